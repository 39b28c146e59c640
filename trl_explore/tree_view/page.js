for (const button of document.querySelectorAll("button[data-open]")) {
  button.addEventListener("click", () => {
    const open = button.dataset.open === "true";
    // "details details": the root stays open, or nothing would be left to see
    for (const node of document.querySelectorAll(".tree details details")) node.open = open;
  });
}
document.documentElement.dataset.ready = "true";
