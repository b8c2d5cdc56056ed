"use strict";
// What is looked at, and how it changes: one panel for each schedule and clock, all on one time axis.

const data = JSON.parse(document.getElementById("data").textContent);
const LEFT = 64, RIGHT = 8, AXIS = 16, MEMORY = 64, GAP = 8;
const [NAME, KIND, VIRTUAL_STAGE, CHUNK, MICROBATCH, START, END, TICK] = Array(8).keys();

const element = (id) => document.getElementById(id);
const number = (value) => String(Number(value.toPrecision(6)));

// Free-running of every schedule, then the other clocks: what is compared lies together.
const clocks = ["free-running", "device", "measured"];
const panels = clocks.flatMap((clock) => data.schedules.flatMap((schedule) =>
  schedule.timelines.filter((timeline) => timeline.clock === clock)
    .map((timeline) => makePanel(schedule, timeline))));
const longest = Math.max(...panels.map((panel) => panel.timeline.makespan));
const lastTick = Math.max(0, ...panels.map((panel) => panel.timeline.ticks.length - 2));
// What is looked at: a span of time, a tick or null, and {panel, stage, time, part or null} or null.
const view = { first: 0, end: longest, tick: null, hover: null };

function makePanel(schedule, timeline) {
  const box = document.createElement("section");
  const title = document.createElement("h2");
  const canvas = document.createElement("canvas");
  title.textContent = timeline.caption;
  box.append(title, canvas);
  element("panels").append(box);
  const row = Math.min(Math.max(Math.floor(320 / schedule.stages), 12), 28);
  const boxes = row * schedule.stages;
  canvas.style.height = `${boxes + GAP + MEMORY + AXIS}px`;
  const peak = timeline.memory.flat().reduce((most, [, held]) => Math.max(most, held), 0);
  const sent = Map.groupBy(timeline.messages, ([action, , sender]) => `${sender} ${action}`);
  return { box, canvas, schedule, timeline, row, boxes, peak, sent };
}

// Time and place.

function plotWidth(panel) {
  return Math.max(panel.canvas.clientWidth - LEFT - RIGHT, 1);
}

function placeOf(panel, time) {
  return LEFT + (time - view.first) / (view.end - view.first) * plotWidth(panel);
}

function timeAt(panel, x) {
  return view.first + (x - LEFT) / plotWidth(panel) * (view.end - view.first);
}

function firstAfter(rows, field, time) {
  // The first of the rows, sorted by a field, that has a larger one.
  let low = 0, high = rows.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (rows[middle][field] > time) high = middle;
    else low = middle + 1;
  }
  return low;
}

function memoryAt(panel, stage, time) {
  const steps = panel.timeline.memory[stage];
  const next = firstAfter(steps, 0, time);
  return next ? steps[next - 1][1] : 0;
}

function ticked(schedule) {
  // On the device clock, which a schedule that can only be simulated lacks.
  return schedule.timelines.find((timeline) => timeline.clock === "device");
}

function partsInTick(schedule, tick) {
  // By stage.
  const rows = ticked(schedule)?.parts ?? Array(schedule.stages).fill([]);
  return rows.map((row) => row.filter((part) => part[TICK] === tick));
}

function draw() {
  for (const panel of panels) if (!panel.box.hidden) drawPanel(panel);
}

let scheduled = false;
function redraw() {
  if (scheduled) return;
  scheduled = true;
  requestAnimationFrame(() => { scheduled = false; draw(); });
}

// What the pointer is on.

function find(panel, x, y) {
  if (x < LEFT || y < 0 || y >= panel.boxes) return null;
  const stage = Math.floor(y / panel.row), time = timeAt(panel, x);
  const parts = panel.timeline.parts[stage];
  const next = parts[firstAfter(parts, END, time)];
  return { panel, stage, time, part: next && next[START] <= time ? next : null };
}

function describe({ panel, stage, time, part }) {
  const held = `${number(memoryAt(panel, stage, time))} microbatches of a full stage in flight`;
  if (!part) return `stage ${stage} is idle\ntime ${number(time)}\n${held}`;
  const lines = [
    `${part[NAME]}, ${data.meanings[part[KIND]]}`,
    `stage ${stage}, chunk ${part[CHUNK]}, virtual stage ${part[VIRTUAL_STAGE]}`,
    `microbatch ${part[MICROBATCH]}`,
    `time ${number(part[START])} to ${number(part[END])}`,
  ];
  if (part[TICK] !== null) lines[3] += `, tick ${part[TICK]}`;
  const pair = panel.timeline.pairs[stage].find(([start, end]) =>
    start <= part[START] && part[END] <= end);
  if (pair) lines.push(`in an overlapped pair, ${number(pair[0])} to ${number(pair[1])}`);
  lines.push(held);
  for (const [, reader, , receiver, , arrives, late] of panel.sent.get(`${stage} ${part[NAME]}`) || [])
    lines.push(`sent to stage ${receiver} for ${reader}, there at ${number(arrives)}${late ? ", a tick late" : ""}`);
  return lines.join("\n");
}

function hoverAt(panel, event) {
  const tip = element("tip");
  view.hover = find(panel, event.offsetX, event.offsetY);
  tip.style.display = view.hover ? "block" : "none";
  if (view.hover) {
    tip.textContent = describe(view.hover);
    tip.style.left = `${Math.min(event.clientX + 14, window.innerWidth - tip.offsetWidth - 8)}px`;
    tip.style.top = `${Math.min(event.clientY + 14, window.innerHeight - tip.offsetHeight - 8)}px`;
  }
  redraw();
}

// Zoom, pan and ticks.

function look(first, end) {
  const span = Math.min(Math.max(end - first, longest * 1e-6), longest);
  view.first = Math.min(Math.max(first, 0), longest - span);
  view.end = view.first + span;
  redraw();
}

function zoom(factor, time = (view.first + view.end) / 2) {
  look(time - (time - view.first) * factor, time + (view.end - time) * factor);
}

function pan(time) {
  look(view.first + time, view.end + time);
}

function goTo(tick) {
  view.tick = Math.min(Math.max(tick, 0), lastTick);
  element("tick").value = `${view.tick} of 0 to ${lastTick}`;
  showTick();
  const ticked = panels.find(({ box, timeline }) =>
    !box.hidden && view.tick + 1 < timeline.ticks.length);
  if (ticked) {
    const { ticks } = ticked.timeline;
    const start = Math.min(...ticks[view.tick]), end = Math.max(...ticks[view.tick + 1]);
    if (start < view.first || end > view.end) pan((start + end - view.first - view.end) / 2);
  }
  redraw();
}

function showTick() {
  // A table: by schedule, what every stage runs in the tick.
  const table = document.createElement("table");
  const most = Math.max(...data.schedules.map((schedule) => schedule.stages));
  const header = table.insertRow();
  for (const text of [`tick ${view.tick}`, ...Array(most).keys()])
    header.insertCell().textContent = typeof text === "number" ? `stage ${text}` : text;
  for (const schedule of data.schedules) {
    const row = table.insertRow(), last = (ticked(schedule)?.ticks.length ?? 0) - 2;
    row.insertCell().textContent = schedule.name;
    for (const parts of partsInTick(schedule, view.tick))
      row.insertCell().textContent =
        parts.map((part) => part[NAME]).join(" ") || (view.tick > last ? "done" : "idle");
  }
  element("now").replaceChildren(table);
}

function step(direction) {
  goTo(view.tick === null ? 0 : view.tick + direction);
}

// Controls.

function addToggles(id, names, nameOf) {
  // Boxes that hide the panels of a clock, or of a schedule.
  element(id).hidden = names.length < 2;
  names.forEach((name) => {
    const label = document.createElement("label"), box = document.createElement("input");
    box.type = "checkbox";
    box.checked = true;
    box.addEventListener("change", () => {
      for (const panel of panels)
        if (nameOf(panel) === name) {
          panel.hides = { ...panel.hides, [id]: !box.checked };
          panel.box.hidden = Object.values(panel.hides).some(Boolean);
        }
      redraw();
    });
    label.append(box, name);
    element(id).append(label);
  });
}

function addLegend() {
  const used = new Set(panels.flatMap(({ timeline }) => timeline.parts.flat().map((part) => part[KIND])));
  const colors = Object.assign({}, ...data.schedules.map((schedule) => schedule.colors));
  const entries = [...used].map((kind) =>
    [Object.keys(colors).sort().find((key) => key.replace(/\d+$/, "") === kind), data.meanings[kind]])
    .map(([key, meaning]) => [colors[key], meaning]);
  const { message, late, pair } = data.exchangeColors;
  entries.push([message, "message"]);
  if (panels.some(({ timeline }) => timeline.messages.some((sent) => sent[6])))
    entries.push([late, "message received a tick late"]);
  if (panels.some(({ timeline }) => timeline.pairs.flat().length))
    entries.push([pair, "frame: forward and backward together"]);
  for (const [color, meaning] of entries) {
    const mark = document.createElement("i");
    mark.style.background = color;
    element("legend").append(mark, meaning);
  }
  if (data.schedules.some((schedule) => schedule.chunks > 1))
    element("legend").append("; later chunks are darker");
}

function listen(panel) {
  const { canvas } = panel;
  let held = null;
  canvas.addEventListener("pointerdown", (event) => {
    held = event.offsetX;
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointerup", () => { held = null; });
  canvas.addEventListener("pointermove", (event) => {
    if (held !== null) {
      pan(timeAt(panel, held) - timeAt(panel, event.offsetX));
      held = event.offsetX;
    }
    hoverAt(panel, event);
  });
  canvas.addEventListener("pointerleave", () => {
    view.hover = null;
    element("tip").style.display = "none";
    redraw();
  });
  canvas.addEventListener("wheel", (event) => {
    if (event.ctrlKey || event.metaKey) zoom(2 ** (event.deltaY / 200), timeAt(panel, event.offsetX));
    else if (event.deltaX || event.shiftKey)
      pan((event.deltaX || event.deltaY) / plotWidth(panel) * (view.end - view.first));
    else return;
    event.preventDefault();
  }, { passive: false });
}

const commands = {
  ArrowLeft: () => step(-1),
  ArrowRight: () => step(1),
  "+": () => zoom(0.5),
  "=": () => zoom(0.5),
  "-": () => zoom(2),
  0: () => look(0, longest),
};

document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || !Object.hasOwn(commands, event.key)) return;
  event.preventDefault();
  commands[event.key]();
});
for (const [id, key] of [["back", "ArrowLeft"], ["forward", "ArrowRight"], ["in", "+"], ["out", "-"], ["all", "0"]])
  element(id).addEventListener("click", commands[key]);
window.addEventListener("resize", redraw);

document.title = data.schedules.map((schedule) => schedule.name).join(", ");
element("tick").value = `0 to ${lastTick}`;
addToggles("clocks", clocks.filter((clock) => panels.some(({ timeline }) => timeline.clock === clock)),
  (panel) => panel.timeline.clock);
addToggles("schedules", [...new Set(data.schedules.map((schedule) => schedule.name))],
  (panel) => panel.schedule.name);
addLegend();
panels.forEach(listen);
draw();
