"""Launch configurations: accelerate reads them and builds its commands, and every flag that is shown exists."""

import os
import re
import shlex
import subprocess
import sys

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
from accelerate.utils.other import get_free_port
from commands import EXAMPLES, ROOT, parsed, shell_calls
from trl.scripts.vllm_serve import ScriptArguments, build_command

from trl_explore.cli.train import parse_train_arguments
from trl_explore.trainers import G2RLConfig

CONFIGS = EXAMPLES / "accelerate_configs"
KINDS = {
    "single_gpu": "NO",
    "multi_gpu": "MULTI_GPU",
    "fsdp2": "FSDP",
    "deepspeed_zero2": "DEEPSPEED",
    "deepspeed_zero3": "DEEPSPEED",
    "multi_node": "MULTI_GPU",
}
NODES = ["--machine_rank", "1", "--main_process_ip", "10.0.0.1"]
SLURM = CONFIGS / "slurm_vllm.sbatch"
PAGE = (ROOT / "docs" / "vllm.md").read_text()


def launch(*flags):
    """What `accelerate launch` has made of its flags and the file, with the environment of its processes."""
    args = launch_command_parser().parse_args([*flags, "script.py", "--flag", "1"])
    if args.main_process_port is None and args.config_file != str(CONFIGS / "multi_node.yaml"):
        args.main_process_port = 0  # any free one: another run here may have the usual one
    args, _, _ = _validate_launch_command(args)
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ""
        return args, prepare_deepspeed_cmd_env(args)[1]
    if args.use_fsdp or args.multi_gpu:
        return args, prepare_multi_gpu_env(args)
    return args, prepare_simple_launcher_cmd_env(args)[1]


def test_every_configuration_is_known_here():
    assert {path.stem for path in CONFIGS.glob("*.yaml")} == KINDS.keys()


@pytest.mark.parametrize("name", KINDS)
def test_accelerate_reads_the_file_and_builds_the_environment(name):
    file = str(CONFIGS / f"{name}.yaml")
    config = load_config_from_file(file)
    assert config.distributed_type == KINDS[name]
    args, environment = launch("--config_file", file, *(NODES if name == "multi_node" else []))
    assert environment["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert args.num_processes == config.num_processes
    # A mistyped key of a section would be set on the arguments and never read.
    known = vars(launch_command_parser().parse_args(["script.py"]))
    for section in ("fsdp_config", "deepspeed_config"):
        assert yaml.safe_load((CONFIGS / f"{name}.yaml").read_text()).get(section, {}).keys() <= known.keys()


def test_one_process_sees_one_gpu():
    _, environment = launch("--config_file", str(CONFIGS / "single_gpu.yaml"))
    assert environment["CUDA_VISIBLE_DEVICES"] == "0"
    _, environment = launch("--config_file", str(CONFIGS / "single_gpu.yaml"), "--gpu_ids", "3")
    assert environment["CUDA_VISIBLE_DEVICES"] == "3"


def test_the_sections_reach_the_processes():
    _, fsdp = launch("--config_file", str(CONFIGS / "fsdp2.yaml"))
    assert (fsdp["FSDP_VERSION"], fsdp["FSDP_STATE_DICT_TYPE"]) == ("2", "FULL_STATE_DICT")
    assert fsdp["FSDP_ACTIVATION_CHECKPOINTING"] == "false"  # which the Trainer refuses beside its own
    for stage in (2, 3):
        _, zero = launch("--config_file", str(CONFIGS / f"deepspeed_zero{stage}.yaml"))
        assert zero["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == str(stage)
        assert zero["ACCELERATE_DEEPSPEED_ZERO3_INIT"] == str(stage == 3).lower()


def test_every_node_starts_its_share_and_meets_at_the_first():
    args, _ = launch("--config_file", str(CONFIGS / "multi_node.yaml"), *NODES)
    assert (args.nnodes, args.nproc_per_node, args.node_rank) == ("2", "4", 1)
    assert (args.rdzv_backend, args.rdzv_endpoint) == ("static", "10.0.0.1:29500")


SCRIPT = """
from accelerate import Accelerator
from accelerate.utils import gather_object

accelerator = Accelerator()
print("found", sorted(gather_object([accelerator.process_index])), flush=True)
accelerator.end_training()  # gloo's threads abort a process that ends while its group still stands
"""


@pytest.mark.slow
def test_two_machines_find_each_other(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    port = str(get_free_port())
    flags = ["--num_processes", "2", "--main_process_ip", "127.0.0.1", "--main_process_port", port]
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", *flags]
    command += ["--config_file", str(CONFIGS / "multi_node.yaml")]
    machines = [
        subprocess.Popen(
            [*command, "--machine_rank", rank, str(tmp_path / "script.py")],
            env={**os.environ, "ACCELERATE_USE_CPU": "true"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in "01"
    ]
    for machine in machines:
        output = machine.communicate(timeout=300)[0]
        assert machine.returncode == 0 and "found [0, 1]" in output, output


def shown_commands():
    """The launch lines of the page."""
    blocks = re.findall(r"```bash\n(.*?)```", PAGE, flags=re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.startswith("accelerate launch")]


def test_every_configuration_has_a_launch_line():
    used = [words[words.index("--config_file") + 1] for words in shown_commands()]
    assert sorted(set(used)) == sorted(f"examples/accelerate_configs/{name}.yaml" for name in KINDS)
    assert "sbatch examples/accelerate_configs/slurm_vllm.sbatch" in PAGE


@pytest.mark.parametrize("words", shown_commands(), ids=lambda words: words[3].split("/")[-1])
def test_what_is_shown_parses_to_the_end(words, monkeypatch):
    monkeypatch.chdir(ROOT)
    args = launch_command_parser().parse_args(words[2:])
    args, _, _ = _validate_launch_command(args)
    if args.module:
        assert args.training_script == "trl_explore.cli" and args.training_script_args[0] == "train"
        parse_train_arguments([*args.training_script_args[1:], "--use_cpu"])
    else:
        parsed([args.training_script, *args.training_script_args], monkeypatch)


def test_a_wrong_flag_would_be_noticed(monkeypatch):
    with pytest.raises(ValueError, match="num_generation_s"):
        parsed(["examples/g2rl.py", "--num_generation_s", "4"], monkeypatch)


STUBS = {
    "scontrol": "print(os.environ['SLURM_JOB_NODELIST'].replace(',', '\\n'))",
    # The script ends what it started in the background when training ends: let that be noted first.
    "srun": "noted = lambda: open(CALLS).read().count('srun')\n"
    "while 'accelerate launch' in str(sys.argv) and noted() <= int(os.environ['WAIT']): time.sleep(0.01)",
}


def submitted(folder, nodes, *, before=1, **environment):
    """Run the batch script; its `srun` calls, as options and command. `before` of them precede training."""
    names = ",".join(f"n{i}" for i in range(nodes))
    done, calls = shell_calls(SLURM, STUBS, folder, SLURM_JOB_NODELIST=names, WAIT=str(before), **environment)
    commands = []
    for words in (call[1:] for call in calls if call[0] == "srun"):
        start = next(i for i, word in enumerate(words) if not word.startswith("--"))
        commands.append((dict(word[2:].split("=", 1) for word in words[:start] if "=" in word), words[start:]))
    return done, commands


@pytest.fixture(scope="module")
def three_nodes(tmp_path_factory):
    done, commands = submitted(tmp_path_factory.mktemp("slurm"), 3)
    assert done.returncode == 0, done.stderr
    return commands


def find(commands, word):
    return [(options, command) for options, command in commands if word in command]


def test_the_first_node_serves_and_the_others_train(three_nodes):
    commands = three_nodes
    ((where, server),) = find(commands, "serve")
    assert where["nodelist"] == "n0" and not find(commands, "ray")
    assert server[server.index("--tensor-parallel-size") + 1] == "4"
    ((where, train),) = find(commands, "examples/g2rl.py")
    assert (where["nodelist"], where["nodes"], where["ntasks"]) == ("n1,n2", "2", "2")
    assert train[train.index("--vllm_server_base_url") + 1] == "http://n0:8000"


def test_the_server_is_started_as_trl_would_start_it(three_nodes):
    ((_, server),) = find(three_nodes, "serve")
    theirs = build_command(ScriptArguments(model="m"))
    imposed = theirs[theirs.index("--weight-transfer-config") :]
    assert " ".join(imposed) in " ".join(server)
    assert "VLLM_SERVER_DEV_MODE=1 srun" in SLURM.read_text()
    ours, known = ({word for word in words if word.startswith("--")} for words in (server, theirs))
    assert ours <= known | {"--max-model-len"}


@pytest.mark.parametrize("config", [None, "fsdp2"])
def test_the_training_command_has_only_flags_that_exist(tmp_path, three_nodes, config, monkeypatch):
    commands = three_nodes
    if config is not None:
        _, commands = submitted(tmp_path, 3, CONFIG=str(CONFIGS / f"{config}.yaml"))
    ((_, train),) = find(commands, "examples/g2rl.py")
    assert train[:2] == ["bash", "-c"] and train[2].startswith("exec accelerate launch --machine_rank")
    words = train[train.index("launch") + 1 :]
    monkeypatch.chdir(ROOT)
    args = launch_command_parser().parse_args(["--machine_rank", "1", *words])
    args, _, _ = _validate_launch_command(args)
    assert (args.num_machines, args.num_processes, args.main_process_ip) == (2, 8, "n1")
    prepare_multi_gpu_env(args)
    assert (args.nnodes, args.nproc_per_node, args.node_rank) == ("2", "4", 1)
    _, training, model = parsed([args.training_script, *args.training_script_args], monkeypatch)
    assert isinstance(training, G2RLConfig) and training.use_vllm and training.vllm_mode == "server"
    server = find(commands, "serve")[0][1]
    assert model.model_name_or_path == server[server.index("serve") + 1]
    assert training.vllm_group_port == 51216
    longest = int(server[server.index("--max-model-len") + 1])
    assert training.max_completion_length < longest


def test_several_serving_nodes_are_joined_by_ray(tmp_path):
    done, commands = submitted(tmp_path, 5, before=4, VLLM_NODES="2")
    assert done.returncode == 0, done.stderr
    starts = find(commands, "start")
    head, workers = (next(c for c in starts if word in c[1]) for word in ("--head", "--address=n0:6379"))
    assert head[0]["nodelist"] == "n0" and workers[0]["nodelist"] == "n1" and workers[0]["ntasks"] == "1"
    ((_, server),) = find(commands, "serve")
    assert server[-2:] == ["--distributed-executor-backend", "ray"]
    assert server[server.index("--tensor-parallel-size") + 1] == "8"
    ((where, _),) = find(commands, "examples/g2rl.py")
    assert where["nodelist"] == "n2,n3,n4"


@pytest.mark.parametrize("serving", ["0", "2"])
def test_each_side_needs_a_node(tmp_path, serving):
    done, commands = submitted(tmp_path, 2, VLLM_NODES=serving)
    assert done.returncode == 2 and not commands
    assert f"VLLM_NODES={serving} of 2 nodes: leave at least one node for each side" in done.stderr
