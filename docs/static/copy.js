// A button on each block of code that copies it. Of a session with a prompt, it copies what was typed.
const typed = (text) => {
  const prompts = /^(>>> |\.\.\. |\$ )/;
  const lines = text.split("\n").filter((line) => prompts.test(line));
  return lines.length ? lines.map((line) => line.replace(prompts, "")).join("\n") : text;
};

document.addEventListener("DOMContentLoaded", () => {
  for (const block of document.querySelectorAll("div.highlight")) {
    const button = document.createElement("button");
    button.className = "copy";
    button.textContent = "Copy";
    button.onclick = async () => {
      await navigator.clipboard.writeText(typed(block.querySelector("pre").textContent));
      button.textContent = "Copied";
      setTimeout(() => (button.textContent = "Copy"), 1500);
    };
    block.append(button);
  }
});
