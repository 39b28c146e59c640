for (const button of document.querySelectorAll("button[data-open]")) {
  button.addEventListener("click", () => {
    const open = button.dataset.open === "true";
    // "details details" excludes the root: if it was closed too, the page would be empty.
    for (const node of document.querySelectorAll(".tree details details")) node.open = open;
  });
}
document.documentElement.dataset.ready = "true";
