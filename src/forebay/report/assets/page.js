"use strict";
const root = document.documentElement;
const button = document.getElementById("theme");
const system = matchMedia("(prefers-color-scheme: dark)");
let chosen = null;
try { chosen = localStorage.getItem("forebay-theme"); } catch { /* a page from a file may have no storage */ }

function dark() { return (chosen || (system.matches ? "dark" : "light")) === "dark"; }
function paint() {
  if (chosen) root.dataset.theme = chosen;
  button.textContent = dark() ? "Light" : "Dark";
  button.setAttribute("aria-label", "Show this page in " + (dark() ? "light" : "dark") + " colors");
}
if (chosen !== "dark" && chosen !== "light") chosen = null;
paint();
system.addEventListener("change", paint);
button.addEventListener("click", () => {
  chosen = dark() ? "light" : "dark";
  try { localStorage.setItem("forebay-theme", chosen); } catch { /* as above */ }
  paint();
});

function element(name, text, className) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

// A chart's figures are in the JSON beside it: {x: [labels], unit, digits, total, series: [{name, color, values}]}.
for (const plot of document.querySelectorAll(".plot[data-live]")) {
  const figures = JSON.parse(plot.querySelector("script").textContent);
  const cursor = element("div", undefined, "cursor"), tip = element("div", undefined, "tip"), said = element("span", undefined, "said");
  said.setAttribute("aria-live", "polite");
  plot.append(cursor, tip, said);
  const count = figures.x.length;
  let at = -1;
  const shown = (value) => (value === null ? "–" : value.toLocaleString("en", { minimumFractionDigits: figures.digits, maximumFractionDigits: figures.digits }) + figures.unit);
  const hide = () => { at = -1; cursor.style.display = tip.style.display = "none"; };
  const show = (column, aloud) => {
    at = Math.max(0, Math.min(count - 1, column));
    const place = figures.places ? figures.places[at] : (at + 0.5) / count;
    cursor.style.display = tip.style.display = "block";
    cursor.style.left = 100 * place + "%";
    tip.replaceChildren(element("p", figures.x[at]));
    const words = [figures.x[at]];
    let total = 0;
    for (const series of figures.series) {
      const value = series.values[at];
      if (value === undefined) continue;
      total += value === null ? 0 : value;
      const row = element("div");
      row.append(element("i", undefined, series.color), element("span", series.name), element("span", shown(value)));
      tip.append(row);
      words.push(series.name + " " + shown(value));
    }
    if (figures.total) {
      const row = element("div");
      row.append(element("i"), element("b", "total"), element("span", shown(total)));
      tip.append(row);
      words.push("total " + shown(total));
    }
    // Beside the cursor where there is room, else within the plot.
    const room = plot.clientWidth, width = tip.offsetWidth, x = place * room;
    const left = x + 10 + width <= room ? x + 10 : x - 10 - width;
    tip.style.left = Math.min(Math.max(left, 0), room - width) + "px";
    said.textContent = aloud ? words.join(", ") : "";
  };
  plot.addEventListener("pointermove", (event) => {
    const box = plot.getBoundingClientRect(), place = (event.clientX - box.left) / box.width;
    if (!figures.places) return show(Math.floor(place * count), false);
    let best = 0;
    figures.places.forEach((each, n) => { if (Math.abs(each - place) < Math.abs(figures.places[best] - place)) best = n; });
    show(best, false);
  });
  plot.addEventListener("pointerleave", hide);
  plot.addEventListener("blur", hide);
  plot.addEventListener("keydown", (event) => {
    const start = at < 0 ? figures.start : at;
    const to = { ArrowRight: start + 1, ArrowLeft: start - 1, Home: 0, End: count - 1, Enter: figures.start }[event.key];
    if (event.key === "Escape") hide();
    if (to === undefined) return;
    event.preventDefault();
    show(at < 0 && event.key.startsWith("Arrow") ? figures.start : to, true);
  });
}
