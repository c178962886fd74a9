"use strict";

// What a page of the store needs a script for: news of a harvest, rows that have some words.

(() => {
  const WAIT = 2000, LONGEST = 30000; // milliseconds between two questions; when nobody answers, ever longer
  const news = document.body.dataset.news;
  const spoken = Object.assign(document.createElement("div"), { className: "unseen" });
  spoken.setAttribute("role", "status");
  document.body.append(spoken);
  let shown = Object.fromEntries([...document.querySelectorAll("[data-harvest]")].map((host) => [host.dataset.harvest, host]));

  async function ask(wait) {
    let next = wait;
    try {
      const answer = await fetch(news, { cache: "no-store" });
      if (!answer.ok) return;
      tell((await answer.json()).progress);
      next = WAIT;
    } catch {
      next = Math.min(LONGEST, 2 * wait); // the server is gone, or comes back
    }
    setTimeout(ask, next, next);
  }

  function tell(progress) {
    const live = Object.fromEntries(progress.map((each) => [each.name, each]));
    for (const [name, host] of Object.entries(shown)) {
      const each = live[name];
      const told = each ? each.told : "finished; reload this page to see the captured activations";
      const line = host.querySelector(".told"), bar = host.querySelector("progress");
      if (line.textContent === told) continue;
      line.textContent = told;
      bar.max = each ? each.total : bar.max;
      bar.value = each ? each.done : bar.max;
      if (!each || bar.value === bar.max) spoken.textContent = `${name}: ${told}`;
    }
    const begun = progress.filter((each) => !(each.name in shown));
    if (begun.length && !document.querySelector(".begun")) {
      const notice = Object.assign(document.createElement("p"), { className: "notice begun" });
      const again = Object.assign(document.createElement("a"), { href: "", textContent: "reload this page" });
      notice.append(`A new capture has begun: ${begun.map((each) => each.name).join(", ")}; `, again, ".");
      document.querySelector("main").prepend(notice);
      spoken.textContent = notice.textContent;
    }
  }

  if (news) setTimeout(ask, WAIT, WAIT);

  const field = document.querySelector("[data-filters] input");
  if (field) {
    const rows = [...document.querySelectorAll("tbody tr")];
    field.form.addEventListener("submit", (event) => event.preventDefault());
    field.addEventListener("input", () => {
      const words = field.value.toLowerCase();
      const kept = rows.filter((row) => !(row.hidden = !row.textContent.toLowerCase().includes(words)));
      spoken.textContent = `${kept.length} of ${rows.length} prompts`;
    });
  }
})();
