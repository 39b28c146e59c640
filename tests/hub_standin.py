"""An HTTP server that does for `huggingface_hub` what the Hub does: repositories, branches, commits, large files."""

import base64
import hashlib
import json
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import PurePosixPath
from urllib.parse import parse_qs, unquote, urlsplit

from card_metadata import metadata_errors

LARGE = (".safetensors", ".bin", ".pt", ".png", ".parquet")
TOKEN = "hf_0123456789"
USERS = {TOKEN: "me", "hf_reader": "reader"}  # `reader` may write nowhere


@dataclass
class Repository:
    """Files of each branch by path, and who may see them."""

    private: bool
    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {".gitattributes": b""}})
    messages: list[str] = field(default_factory=list)

    def commit_id(self, branch: str) -> str:
        return hashlib.sha1(f"{branch}{len(self.messages)}".encode()).hexdigest()


class StandIn:
    """The server, in a thread. `failures` holds [part of a path, status, requests still to fail]."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}  # "models/me/name"
        self.objects: dict[str, bytes] = {}
        self.failures: list[list] = []
        self.requests: list[str] = []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def files(self, name: str, branch: str = "main") -> dict[str, bytes]:
        return self.repositories[f"models/{name}"].branches[branch]


class Handler(BaseHTTPRequestHandler):
    hub: StandIn
    protocol_version = "HTTP/1.1"

    def log_message(self, *args) -> None:
        pass

    def answer(self, body, status: int = 200, error: str = "", **headers: str) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in ({"X-Error-Code": error, "X-Error-Message": error} if error else {} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def handle_request(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        for failure in self.hub.failures:
            if failure[0] in path and failure[2] > 0:
                failure[2] -= 1
                return self.answer({"error": "out of order"}, failure[1])
        if path.startswith("/lfs/"):
            return self.large_file(path.removeprefix("/lfs/"), body)
        self.user = USERS.get(self.headers.get("Authorization", "").removeprefix("Bearer "))
        if self.user is None and "Authorization" in self.headers:
            return self.answer({"error": "Invalid credentials"}, 401)
        if path == "/api/validate-yaml":
            errors = metadata_errors(json.loads(body)["content"])
            report = {"errors": [{"message": error} for error in errors], "warnings": []}
            return self.answer(report, 400 if errors else 200)
        if path == "/api/repos/create":
            return self.create(json.loads(body))
        if match := re.fullmatch(r"/(?:(datasets)/)?([\w.-]+/[\w.-]+)/resolve/([^/]+)/(.+)", path):
            return self.resolve(*match.groups())
        if match := re.fullmatch(r"/(?:(datasets)/)?([\w.-]+/[\w.-]+)\.git/info/lfs/objects/batch", path):
            return self.batch(json.loads(body))
        if match := re.fullmatch(r"/api/(models|datasets)/([\w.-]+/[\w.-]+)(?:/([\w-]+)(?:/(.+))?)?", path):
            return self.repository(*match.groups(), body)
        self.answer({"error": "Not Found"}, 404)

    do_GET = do_HEAD = do_POST = do_PUT = handle_request

    def writes(self, owner: str) -> bool:
        if self.user == owner == "me":
            return True
        self.answer({"error": f"You don't have the rights to write under {owner!r}"}, 403 if self.user else 401)
        return False

    def create(self, wanted: dict) -> None:
        owner = wanted.get("organization") or self.user or ""
        kind, repo_id = f"{wanted.get('type', 'model')}s", f"{owner}/{wanted['name']}"
        if not self.writes(owner):
            return
        url = f"{self.hub.url}/{'datasets/' if kind == 'datasets' else ''}{repo_id}"
        exists = f"{kind}/{repo_id}" in self.hub.repositories
        if not exists:
            private = wanted.get("private", False) or wanted.get("visibility") == "private"
            self.hub.repositories[f"{kind}/{repo_id}"] = Repository(private)
        self.answer({"url": url, "name": repo_id}, 409 if exists else 200)

    def find(self, kind: str, repo_id: str, revision: str) -> tuple[Repository, str] | None:
        repository = self.hub.repositories.get(f"{kind}/{repo_id}")
        if repository is None or (repository.private and self.user != repo_id.split("/")[0]):
            return self.answer({"error": "Repository not found"}, 404, error="RepoNotFound")
        for branch in repository.branches:
            if revision in (branch, repository.commit_id(branch)):
                return repository, branch
        return self.answer({"error": "Revision not found"}, 404, error="RevisionNotFound")

    def entry(self, path: str, content: bytes) -> dict:
        blob = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        entry = {"type": "file", "path": path, "size": len(content), "oid": blob}
        if path.endswith(LARGE):
            entry["lfs"] = {"oid": hashlib.sha256(content).hexdigest(), "size": len(content), "pointerSize": 130}
        return entry

    def repository(self, kind: str, repo_id: str, verb: str | None, rest: str | None, body: bytes) -> None:
        if verb == "branch":
            found = self.find(kind, repo_id, "main")
            if found and self.writes(repo_id.split("/")[0]):
                found[0].branches[str(rest)] = dict(found[0].branches["main"])
                self.answer({})
            return
        revision, _, folder = (rest or "main").partition("/")
        found = self.find(kind, repo_id, revision)
        if found is None:
            return
        files = found[0].branches[found[1]]
        entries = {path: self.entry(path, content) for path, content in files.items()}
        parents = {str(parent) for path in files for parent in PurePosixPath(path).parents} - {"."}
        listed = {path: {"type": "directory", "path": path, "oid": "0"} for path in sorted(parents)} | entries
        if verb in (None, "revision"):
            about = {"sha": found[0].commit_id(found[1]), "private": found[0].private, "tags": []}
            self.answer({"id": repo_id, "siblings": [{"rfilename": path} for path in files], **about})
        elif verb == "tree":
            whole, start = "recursive=true" in self.path.lower(), f"{folder}/" if folder else ""
            inside = [listed[p] for p in listed if p.startswith(start) and (whole or "/" not in p[len(start) :])]
            self.answer(inside, **({} if inside else {"status": 404, "error": "EntryNotFound"}))
        elif verb == "paths-info":
            self.answer([listed[path] for path in parse_qs(body.decode()).get("paths", []) if path in listed])
        elif verb == "preupload":
            known = {path: (entry.get("lfs") or entry)["oid"] for path, entry in entries.items()}
            asked = [file["path"] for file in json.loads(body)["files"]]
            modes = {path: {"uploadMode": "lfs" if path.endswith(LARGE) else "regular"} for path in asked}
            common = {"shouldIgnore": False}
            self.answer({"files": [{"path": p, "oid": known.get(p), **modes[p], **common} for p in asked]})
        elif verb == "commit" and self.writes(repo_id.split("/")[0]):
            for line in body.splitlines():
                item = json.loads(line)
                if item["key"] == "header":
                    found[0].messages.append(item["value"]["summary"])
                elif item["key"] == "file":
                    files[item["value"]["path"]] = base64.b64decode(item["value"]["content"])
                elif item["key"] == "lfsFile":
                    files[item["value"]["path"]] = self.hub.objects[item["value"]["oid"]]
            commit = found[0].commit_id(found[1])
            self.answer({"commitUrl": f"{self.hub.url}/{repo_id}/commit/{commit}", "commitOid": commit})

    def batch(self, asked: dict) -> None:
        objects = [{"oid": item["oid"], "size": item["size"]} for item in asked["objects"]]
        for item in objects:
            if item["oid"] not in self.hub.objects:
                item["actions"] = {"upload": {"href": f"{self.hub.url}/lfs/{item['oid']}"}}
        self.answer({"transfer": "basic", "objects": objects})

    def large_file(self, oid: str, body: bytes) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            return self.answer({}, 422)
        self.hub.objects[oid] = body
        self.answer({})

    def resolve(self, kind: str | None, repo_id: str, revision: str, path: str) -> None:
        found = self.find(kind or "models", repo_id, revision)
        if found is None:
            return
        repository, branch = found
        content = repository.branches[branch].get(path)
        if content is None:
            return self.answer({"error": "Entry not found"}, 404, error="EntryNotFound")
        tag = self.entry(path, content)["oid"]
        self.answer(content, ETag=f'"{tag}"', X_Repo_Commit=repository.commit_id(branch))
