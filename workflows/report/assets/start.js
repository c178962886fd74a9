// Draw what is in view of its choice: an element that is not shown costs nothing until it is chosen.

function draw(root) {
  for (const host of root.querySelectorAll("[data-kind]")) {
    if (host.dataset.drawn || host.closest(".hidden")) continue;
    host.dataset.drawn = "yes";
    DRAW[host.dataset.kind](host, JSON.parse(host.querySelector("script").textContent));
  }
}

for (const choice of document.querySelectorAll(".choice")) {
  const options = [...choice.children];
  const labels = options.map((option) => option.dataset.label);
  const show = (chosen) => {
    options.forEach((option, i) => option.classList.toggle("hidden", i !== chosen));
    draw(options[chosen]);
  };
  const short = options.length <= 8 && labels.join("").length <= 70;
  const start = Number(choice.dataset.start);
  options.forEach((option, i) => option.classList.toggle("hidden", i !== start));
  if (options.length > 1) choice.before(make("div", { class: "controls" }, (short ? segments : menu)(choice.dataset.name, labels, start, show)));
}

draw(document);
document.documentElement.dataset.ready = "yes";
