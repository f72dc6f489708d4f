// Theme, time zone, copy buttons, links out of the frame, charts, and refreshing. The page shows all its facts without this script.
(function () {
  "use strict";
  const root = document.documentElement;

  function outer() {
    // Airflow's UI and this frame have the same origin. A page that is opened alone has no parent window.
    try { return window.parent !== window && window.parent.document ? window.parent : null; } catch (_) { return null; }
  }

  function stored(name) {
    try {
      const text = window.localStorage.getItem(name);
      return text === null ? null : text.replace(/^"|"$/g, "");
    } catch (_) { return null; }
  }

  function theme() {
    const above = outer();
    const said = above ? [...above.document.documentElement.classList].find((c) => c === "dark" || c === "light") : null;
    const own = stored("theme");
    const preferred = window.matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
    root.dataset.theme = said || (own === "dark" || own === "light" ? own : preferred);
  }
  theme();

  function title() {
    // The browser's tab shows the title of Airflow's window, which says "Airflow" on all pages of plugins.
    const above = outer();
    if (above) above.document.title = `${document.title} - Airflow`;
    // In the tab of a DAG that has the pipeline's name, Airflow's header says what this page's header would say.
    const [name, dag] = ["h1", "header .out"].map((one) => document.querySelector(one));
    const there = above && dag && `${above.location.pathname}/`.startsWith(`${new URL(dag.href).pathname}/`);
    root.classList.toggle("inside", Boolean(there) && dag.textContent === `DAG ${name.textContent}`);
  }

  // An instant in a text that is not part of a page's markup, such as the tooltip of a chart.
  const INSTANT = /\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?Z/g;
  let local = (text) => text;

  function times(within) {
    const zone = stored("timezone") || "UTC";
    const parts = { year: "numeric", month: "2-digit", day: "2-digit", hour: "2-digit", minute: "2-digit", hourCycle: "h23", timeZone: zone, timeZoneName: "short" };
    let short, long;
    try {
      short = new Intl.DateTimeFormat("en-CA", parts);
      long = new Intl.DateTimeFormat("en-CA", { ...parts, second: "2-digit" });
    } catch (_) { return; }
    const text = (format, at) => {
      const of = Object.fromEntries(format.formatToParts(at).map((p) => [p.type, p.value]));
      return `${of.year}-${of.month}-${of.day} ${of.hour}:${of.minute}${of.second ? ":" + of.second : ""} ${of.timeZoneName}`;
    };
    local = (words) => words.replace(INSTANT, (instant) => text(short, new Date(instant)));
    for (const element of within.querySelectorAll("[data-zone]")) {
      element.textContent = zone === "UTC" ? "Times are in UTC" : `Times are in ${zone}, those in commands in UTC`;
    }
    for (const element of within.querySelectorAll("time[data-instant]")) {
      const at = new Date(element.dateTime);
      element.textContent = text("seconds" in element.dataset ? long : short, at);
    }
  }

  function copyButtons(within) {
    for (const button of within.querySelectorAll("button[data-copy]")) {
      button.addEventListener("click", async () => {
        let done = true;
        try { await navigator.clipboard.writeText(button.dataset.copy); } catch (_) {
          const range = document.createRange();
          range.selectNodeContents(button.parentElement.querySelector("pre"));
          const selection = window.getSelection();
          selection.removeAllRanges();
          selection.addRange(range);
          done = document.execCommand("copy");
        }
        button.textContent = done ? "Copied" : "Selected";
        window.setTimeout(() => { button.textContent = "Copy"; }, 2000);
      });
    }
  }

  function linksOut(within) {
    // The frame's sandbox blocks links that would navigate the whole window. So the parent document clicks a copy of the link.
    const above = outer();
    if (!above) return;
    for (const link of within.querySelectorAll("a[data-airflow]")) {
      link.addEventListener("click", (event) => {
        event.preventDefault();
        const there = above.document.createElement("a");
        there.href = link.href;
        above.document.body.append(there);
        there.click();
        there.remove();
      });
    }
  }

  function finders(within) {
    // A refresh keeps what was typed.
    for (const input of within.querySelectorAll("input[data-find]")) {
      const find = () => {
        window.sessionStorage.setItem("cairn-find", input.value);
        const wanted = input.value.toLowerCase();
        for (const row of document.querySelectorAll(input.dataset.find)) row.hidden = !row.textContent.toLowerCase().includes(wanted);
      };
      input.value = window.sessionStorage.getItem("cairn-find") || "";
      input.addEventListener("input", find);
      find();
    }
  }

  function charts(within) {
    for (const figure of within.querySelectorAll(".chart")) {
      const spots = [...figure.querySelectorAll("[data-tip]")];
      const tip = document.createElement("div");
      tip.hidden = true;
      figure.append(tip);
      let from = null;
      const show = (spot) => {
        tip.textContent = local(spot.dataset.tip);
        tip.hidden = false;
        tip.className = spot.offsetLeft < figure.clientWidth / 2 ? "tip right" : "tip left";
        const a = spots.indexOf(from || spot), b = spots.indexOf(spot);
        spots.forEach((s, n) => s.classList.toggle("on", n >= Math.min(a, b) && n <= Math.max(a, b)));
      };
      const clear = () => {
        tip.hidden = true;
        from = null;
        spots.forEach((s) => s.classList.remove("on"));
      };
      for (const spot of spots) {
        spot.addEventListener("pointerenter", () => show(spot));
        if (!("zoom" in figure.dataset)) continue;
        spot.addEventListener("pointerdown", (event) => { from = spot; event.preventDefault(); });
        spot.addEventListener("pointerup", () => {
          if (from && from !== spot) {
            const ids = [Number(from.dataset.id), Number(spot.dataset.id)];
            window.location.search = `?first=${Math.min(...ids)}&last=${Math.max(...ids)}`;
          }
          from = null;
        });
      }
      figure.addEventListener("pointerleave", clear);
    }
  }

  function furnish(within) {
    times(within);
    copyButtons(within);
    linksOut(within);
    finders(within);
    charts(within);
  }

  function busy() {
    // The page is not replaced while the user reads a chart's figures, selects text or uses a form.
    const at = document.activeElement;
    const open = document.querySelector("details[open], .tip:not([hidden])");
    return document.hidden || open || String(window.getSelection()) !== "" || (at && ["INPUT", "SELECT", "BUTTON", "PRE"].includes(at.tagName));
  }

  async function again() {
    if (!busy()) {
      try {
        const answer = await fetch(window.location.href, { headers: { Accept: "text/html" }, redirect: "follow" });
        if (answer.ok) {
          const page = new DOMParser().parseFromString(await answer.text(), "text/html");
          const fresh = document.adoptNode(page.getElementById("page"));
          const at = document.activeElement && document.activeElement.getAttribute("href");
          const rows = [...document.querySelectorAll(".wide")].map((w) => w.scrollLeft);
          document.getElementById("page").replaceWith(fresh);
          [...document.querySelectorAll(".wide")].forEach((w, n) => { w.scrollLeft = rows[n] || 0; });
          if (at) { const link = [...document.querySelectorAll("a")].find((a) => a.getAttribute("href") === at); if (link) link.focus(); }
          document.body.dataset.refresh = page.body.dataset.refresh;
          document.title = page.title;
          title();
          furnish(document);
        }
      } catch (_) { /* The server does not answer. The page shows how old it is, and the next refresh asks again. */ }
    }
    plan();
  }

  function plan() {
    if (document.body.dataset.refresh === "yes") window.setTimeout(again, 5000);
  }

  window.addEventListener("storage", (event) => {
    if (event.key === "theme") theme();
    if (event.key === "timezone") times(document);
  });
  window.addEventListener("DOMContentLoaded", () => {
    const above = outer();
    if (above) {
      const before = above.document.title;
      title();
      window.addEventListener("pagehide", () => { above.document.title = before; });
    }
    if (above) new MutationObserver(theme).observe(above.document.documentElement, { attributes: true, attributeFilter: ["class"] });
    furnish(document);
    plan();
  });
})();
