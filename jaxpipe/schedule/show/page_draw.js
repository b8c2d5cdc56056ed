"use strict";
// Draws one panel: a schedule on one clock, its boxes, messages and memory. Uses page.js's state.

const MAX_MESSAGES = 1500; // More lines than this are a gray area.

function drawPanel(panel) {
  const { canvas } = panel, scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  pen.font = "11px system-ui, sans-serif";
  pen.textBaseline = "middle";
  drawStages(pen, panel);
  pen.save();
  pen.beginPath();
  pen.rect(LEFT, 0, width - LEFT - RIGHT, height);
  pen.clip();
  drawTicks(pen, panel);
  const marked = markedParts(panel);
  for (let stage = 0; stage < panel.schedule.stages; stage++) drawRow(pen, panel, stage, marked);
  drawExchanges(pen, panel);
  drawMemory(pen, panel);
  drawAxis(pen, panel, height);
  if (view.hover) {
    const x = placeOf(panel, view.hover.time);
    pen.strokeStyle = "#888";
    line(pen, x, 0, x, height - AXIS);
  }
  pen.restore();
}

function line(pen, x0, y0, x1, y1) {
  pen.beginPath();
  pen.moveTo(x0, y0);
  pen.lineTo(x1, y1);
  pen.stroke();
}

function drawStages(pen, panel) {
  for (let stage = 0; stage < panel.schedule.stages; stage++) {
    // In the color of its curve of memory.
    pen.fillStyle = panel.schedule.stageColors[stage];
    pen.fillRect(LEFT - 8, stage * panel.row + 1, 4, panel.row - 2);
    pen.fillStyle = "#222";
    pen.fillText(`stage ${stage}`, 0, (stage + 0.5) * panel.row);
  }
  const top = panel.boxes + GAP;
  pen.fillText("in flight", 0, top + MEMORY / 2);
  pen.textAlign = "right";
  pen.fillText(number(panel.peak), LEFT - 4, top + 6);
  pen.fillText("0", LEFT - 4, top + MEMORY - 4);
  pen.textAlign = "left";
}

function drawTicks(pen, panel) {
  const { ticks } = panel.timeline;
  if (view.tick !== null && view.tick + 1 < ticks.length) {
    pen.fillStyle = "#fff0b8";
    ticks[view.tick].forEach((start, stage) => {
      const x = placeOf(panel, start), end = placeOf(panel, ticks[view.tick + 1][stage]);
      pen.fillRect(x, stage * panel.row, end - x, panel.row);
    });
  }
}

function markedParts(panel) {
  // The names of the tick's actions, where the clock has no ticks, and the one under the pointer.
  const marked = new Set();
  if (view.tick !== null && !panel.timeline.ticks.length)
    for (const part of partsInTick(panel.schedule, view.tick).flat()) marked.add(part[NAME]);
  const hover = view.hover;
  if (hover && hover.part && hover.panel.schedule === panel.schedule) marked.add(hover.part[NAME]);
  return marked;
}

function drawRow(pen, panel, stage, marked) {
  const { schedule, row } = panel, parts = panel.timeline.parts[stage];
  const top = stage * row + 1, height = row - 2;
  let covered = -Infinity;
  for (let k = firstAfter(parts, END, view.first); k < parts.length; k++) {
    const part = parts[k];
    if (part[START] >= view.end) break;
    const x = placeOf(panel, part[START]), end = placeOf(panel, part[END]);
    const outlined = marked.has(part[NAME]);
    if (end - covered < 0.5 && !outlined) continue; // within a pixel that is drawn
    covered = end;
    pen.fillStyle = schedule.colors[part[KIND] + part[CHUNK]];
    pen.fillRect(x, top, Math.max(end - x - (end - x > 4 ? 1 : 0), 0.5), height);
    if (outlined) {
      pen.strokeStyle = "#000";
      pen.lineWidth = 2;
      pen.strokeRect(x + 1, top + 1, Math.max(end - x - 2, 1), height - 2);
      pen.lineWidth = 1;
    }
    if (end - x > 10) drawLabel(pen, panel, part, x, end, top + height / 2);
  }
  drawPairs(pen, panel, stage, top, height);
}

function drawPairs(pen, panel, stage, top, height) {
  // Frames around forwards and the backwards that run together with them.
  const pairs = panel.timeline.pairs[stage];
  pen.strokeStyle = data.exchangeColors.pair;
  for (let k = firstAfter(pairs, 1, view.first); k < pairs.length; k++) {
    if (pairs[k][0] >= view.end) break;
    const x = placeOf(panel, pairs[k][0]), end = placeOf(panel, pairs[k][1]);
    if (end - x > 3) pen.strokeRect(x + 0.5, top + 0.5, end - x - 2, height - 1);
  }
}

function drawLabel(pen, panel, part, x, end, y) {
  const left = Math.max(x, LEFT), right = Math.min(end, panel.canvas.clientWidth - RIGHT);
  const fits = [part[NAME], String(part[MICROBATCH])]
    .find((text) => pen.measureText(text).width < right - left - 1);
  if (!fits) return;
  // Only the darker half of the shades needs white numbers.
  pen.fillStyle = 2 * part[CHUNK] >= panel.schedule.chunks ? "#fff" : "#000";
  pen.textAlign = "center";
  pen.fillText(fits, (left + right) / 2, y + 0.5);
  pen.textAlign = "left";
}

function drawExchanges(pen, panel) {
  const { row, timeline } = panel, colors = data.exchangeColors;
  const seen = timeline.messages.filter(([, , , , sent, arrives]) =>
    sent <= view.end && arrives >= view.first);
  if (seen.length <= MAX_MESSAGES)
    for (const [, , sender, receiver, sent, arrives, late] of seen) {
      const toward = receiver > sender ? 0.4 : -0.4;
      pen.strokeStyle = late ? colors.late : colors.message;
      line(pen, placeOf(panel, sent), (sender + 0.5 + toward) * row,
        placeOf(panel, arrives), (receiver + 0.5 - toward) * row);
    }
}

function drawMemory(pen, panel) {
  const bottom = panel.boxes + GAP + MEMORY, { hover } = view;
  const alone = hover && hover.panel.schedule === panel.schedule ? hover.stage : null;
  panel.timeline.memory.forEach((steps, stage) => {
    pen.strokeStyle = panel.schedule.stageColors[stage];
    pen.globalAlpha = alone === null || alone === stage ? 1 : 0.2;
    pen.lineWidth = alone === stage ? 2 : 1;
    let y = bottom - memoryAt(panel, stage, view.first) / panel.peak * (MEMORY - 4);
    pen.beginPath();
    pen.moveTo(LEFT, y);
    for (let k = firstAfter(steps, 0, view.first); k < steps.length; k++) {
      if (steps[k][0] > view.end) break;
      const x = placeOf(panel, steps[k][0]);
      pen.lineTo(x, y);
      y = bottom - steps[k][1] / panel.peak * (MEMORY - 4);
      pen.lineTo(x, y);
    }
    pen.lineTo(placeOf(panel, Math.min(view.end, panel.timeline.makespan)), y);
    pen.stroke();
  });
  pen.globalAlpha = 1;
  pen.lineWidth = 1;
}

function drawAxis(pen, panel, height) {
  const rough = (view.end - view.first) / 10, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const top = height - AXIS;
  pen.strokeStyle = "#888";
  pen.fillStyle = "#444";
  line(pen, LEFT, top, panel.canvas.clientWidth - RIGHT, top);
  for (let k = Math.ceil(view.first / step); k * step <= view.end; k++) {
    const x = placeOf(panel, k * step);
    line(pen, x, top, x, top + 3);
    pen.fillText(number(k * step), x + 2, top + 10);
  }
}
