"use strict";
// Draws the model on canvases. What is narrower than a pixel is drawn once per pixel, so that the
// cost of a picture follows its width and not the number of actions.

const RIGHT = 12;
let GUTTER = 132, RANK = 62; // what is beside the chart: ranks, and behind or below them the names of runs
const FAINT = 0.22; // what a search has not found

/** Where every lane is, from top to bottom; recomputed when views are shown or hidden. */
class Layout {
  constructor(model, room) {
    const shown = model.views.filter((view) => view.shown);
    const rowsBeside = (lanes) => lanes.slice(1).reduce((n, lane) => n + lane.depth, 0);
    const thin = shown.reduce((n, view) => Math.max(n, ...view.lanes.map(rowsBeside)), 0);
    const blocks = Math.max(1, model.numRanks * shown.length);
    const share = room / blocks;
    this.main = Math.max(9, Math.min(30, share * 0.62));
    this.thin = thin ? Math.max(4, Math.min(11, (share * 0.3) / thin)) : 0;
    this.rows = [];
    this.blocks = [];
    let y = 8;
    for (let rank = 0; rank < model.numRanks; rank++) {
      const top = y;
      for (const view of shown) {
        this.blocks.push({ rank, view, top: y, height: this.main });
        view.lanes[rank].forEach((lane, i) => {
          const height = i ? this.thin : this.main;
          this.rows.push({ lane, top: y, height, bottom: y + lane.depth * (height + 1) - 1 });
          y = this.rows.at(-1).bottom + 2;
        });
        y += Math.min(8, this.main / 3);
      }
      this.blocks.at(-1).last = true;
      this.blocks.findLast((block) => block.rank === rank && block.top === top).first = true;
      y += Math.min(14, this.main / 2);
    }
    this.height = Math.max(60, y);
  }

  at(y) { return this.rows.find((row) => y >= row.top - 1 && y <= row.bottom + 1); }
  of(lane) { return this.rows.find((row) => row.lane === lane); }
}

/** The top of the n-th of the rows that spans of one lane have where they overlap. */
const topOf = (row, n) => row.top + n * (row.height + 1);

class Painter {
  constructor(model) {
    this.model = model;
    this.readColors();
  }

  /** Take over what the page's style says; it changes between light and dark. */
  readColors() {
    const style = getComputedStyle(document.documentElement);
    this.color = {};
    for (const name of ["ink", "soft", "line", "grid", "row", "thin", "card", "path", "accent", "wait", "update", "waits-sync", "waits-p2p"]) {
      this.color[name] = style.getPropertyValue(`--${name}`).trim();
    }
    this.font = getComputedStyle(document.body).fontFamily;
    this.fills = new Map();
  }

  fill(meaning) {
    if (!this.fills.has(meaning)) {
      const shades = this.model.palette[meaning.kind];
      this.fills.set(meaning, shades ? shades[Math.min(meaning.segment, shades.length - 1)] : this.color[meaning.kind] ?? this.color.row);
    }
    return this.fills.get(meaning);
  }

  chart(surface, layout, view, width, marked, showPath) {
    const c = surface.resize(width, layout.height);
    const per = (width - GUTTER - RIGHT) / (view.to - view.from);
    const x = (time) => GUTTER + (time - view.from) * per;
    this.gutter(c, layout);
    c.save();
    c.beginPath();
    c.rect(GUTTER, 0, width - GUTTER - RIGHT, layout.height);
    c.clip();
    for (const { lane, top, bottom } of layout.rows) {
      c.fillStyle = lane.name === "compute" ? this.color.row : this.color.thin;
      const from = Math.max(GUTTER, x(0)), to = Math.min(width, x(this.model.views[lane.view].borders.at(-1) ?? this.model.duration));
      if (to > from) c.fillRect(from, top, to - from, bottom - top);
    }
    for (const tick of ticks(view, width - GUTTER)) {
      c.fillStyle = this.color.grid;
      c.fillRect(Math.round(x(tick)), 0, 1, layout.height);
    }
    for (const row of layout.rows) this.lane(c, row, view, x, per);
    this.ends(c, layout, x);
    if (showPath && !this.hits) this.path(c, layout, view, x);
    if (view.range) this.range(c, view.range.map(x), layout.height);
    for (const mark of marked) this.mark(c, layout, mark, x, per);
    c.restore();
  }

  /** Give names of runs the room that they need, but at most a third of the width: below ranks if not behind. */
  makeRoom(c, width) {
    c.font = `12px ${this.font}`;
    const names = this.model.views.filter((view) => view.shown).map((view) => c.measureText(view.name).width);
    const widest = Math.max(...names) + 8;
    RANK = 62 + widest > width / 3 ? 0 : 62;
    GUTTER = Math.ceil(Math.max(62, Math.min(RANK + widest, width / 3)));
  }

  gutter(c, layout) {
    c.textBaseline = "middle";
    for (const { rank, view, top, height, first } of layout.blocks) {
      const middle = top + height / 2, below = first && !RANK ? 7 : 0;
      if (first) {
        c.font = `600 ${Math.min(13.5, height + 2)}px ${this.font}`;
        c.fillStyle = this.color.ink;
        c.fillText(`rank ${rank}`, 0, middle - below);
      }
      c.font = `${Math.min(12, height + 1)}px ${this.font}`;
      c.fillStyle = this.color.soft;
      let name = view.name;
      while (name.length > 1 && c.measureText(name).width > GUTTER - RANK - 4) name = `${name.slice(0, -2)}…`;
      c.fillText(name, RANK, middle + below);
    }
  }

  lane(c, row, view, x, per) {
    const { lane, height } = row, last = view.to, hits = this.hits && (this.hits.get(lane) ?? new Set());
    const runs = []; // per row, neighbours of one color that are too narrow to be told apart
    const flush = (n) => {
      const run = runs[n];
      if (!run) return;
      c.globalAlpha = run.faint ? FAINT : 1;
      c.fillStyle = run.fill;
      c.fillRect(run.left, topOf(row, n), Math.max(1, run.right - run.left), height);
      runs[n] = null;
    };
    for (let i = lane.firstAfter(view.from); i < lane.length && lane.start[i] < last; i++) {
      const left = x(lane.start[i]), width = (lane.end[i] - lane.start[i]) * per;
      const meaning = lane.meaning[i], fill = this.fill(meaning), n = lane.row[i], run = runs[n];
      const faint = Boolean(hits) && !hits.has(i);
      if (width < 3) {
        if (meaning.kind === "idle") continue;
        if (run && run.fill === fill && run.faint === faint && left <= run.right + 0.6) { run.right = Math.max(run.right, left + width); continue; }
        if (run && left + width <= run.right && (faint || !run.faint)) continue;
        flush(n);
        runs[n] = { fill, faint, left, right: left + width };
        continue;
      }
      flush(n);
      c.globalAlpha = faint ? FAINT : 1;
      if (meaning.kind === "wait" || meaning.kind === "idle") this.outline(c, left, row.top, width, height, meaning);
      else this.box(c, left, topOf(row, n), width, height, fill, meaning);
    }
    runs.forEach((_, n) => flush(n));
    c.globalAlpha = 1;
  }

  /** Waiting is no work: an outline in the color of what is waited for. */
  outline(c, left, top, width, height, meaning) {
    const color = meaning.kind === "idle" ? this.color.line : this.color[`waits-${meaning.waited}`];
    const alpha = c.globalAlpha;
    c.beginPath();
    c.roundRect(left + 1, top + 0.75, Math.max(1, width - 2), height - 1.5, Math.min(3, width / 4, height / 4));
    if (meaning.kind === "wait") {
      c.globalAlpha = 0.14 * alpha;
      c.fillStyle = color;
      c.fill();
      c.globalAlpha = alpha;
    }
    c.strokeStyle = color;
    c.lineWidth = 1.5;
    c.stroke();
    c.lineWidth = 1;
  }

  range(c, [left, right], height) {
    c.fillStyle = this.color.accent;
    c.globalAlpha = 0.13;
    c.fillRect(left, 0, right - left, height);
    c.globalAlpha = 1;
    for (const edge of [left, right]) c.fillRect(edge - 0.75, 0, 1.5, height);
  }

  box(c, left, top, width, height, fill, meaning) {
    c.fillStyle = fill;
    const inset = width > 5 ? 0.5 : 0, round = Math.min(3, width / 4, height / 4);
    c.beginPath();
    c.roundRect(left + inset, top, width - 2 * inset, height, round);
    c.fill();
    const label = meaning.kind === "sync" && meaning.microbatch === "" ? `DP.sync ${meaning.segment}` : meaning.microbatch;
    const size = Math.min(12.5, height - 2);
    if (!label || size < 8.5 || width < label.length * size * 0.6 + 4) return;
    c.font = `${size}px ${this.font}`;
    c.textBaseline = "middle";
    c.textAlign = "center";
    c.fillStyle = textOn(fill);
    const seen = [Math.max(GUTTER, left), Math.min(this.right ?? Infinity, left + width)];
    c.fillText(label, (seen[0] + seen[1]) / 2, top + height / 2 + 0.5);
    c.textAlign = "start";
  }

  ends(c, layout, x) {
    const shown = this.model.views.filter((view) => view.shown);
    const count = Math.max(...shown.map((view) => view.borders.length));
    const longest = (i) => Math.max(...shown.map((view) => view.borders[i] ?? 0));
    const ends = this.model.aligned ? Array.from({ length: count }, (_, i) => longest(i)) : shown[0]?.borders ?? [];
    c.strokeStyle = this.color.soft;
    c.setLineDash([4, 4]);
    for (const end of ends) {
      c.beginPath();
      c.moveTo(x(end), 0);
      c.lineTo(x(end), layout.height);
      c.stroke();
    }
    c.setLineDash([]);
  }

  /** A stripe under each box of the critical path, and thin lines where it moves to another lane. */
  path(c, layout, view, x) {
    const followed = this.model.views.find((each) => each.shown); // of two, lines would cross
    const points = followed.path.map(({ lane, index }) => {
      const row = layout.of(lane);
      return { from: x(lane.start[index]), to: x(lane.end[index]), y: topOf(row, lane.row[index]) + row.height - 1 };
    }).filter((point) => point.to > GUTTER - 50 && point.from < view.width + 50);
    c.strokeStyle = this.color.path;
    c.lineWidth = 1;
    c.beginPath();
    points.slice(1).forEach((point, i) => {
      const before = points[i], bend = Math.round(Math.max(before.to, point.from)) + 0.5;
      c.moveTo(before.to, before.y);
      c.lineTo(bend, before.y);
      c.lineTo(bend, point.y);
    });
    c.stroke();
    c.lineWidth = 2.5;
    c.beginPath();
    for (const { from, to, y } of points) {
      c.moveTo(from, y);
      c.lineTo(Math.max(to, from + 0.5), y);
    }
    c.stroke();
    c.lineWidth = 1;
  }

  mark(c, layout, { lane, index, strong }, x, per) {
    const row = layout.of(lane);
    if (!row) return;
    c.strokeStyle = strong ? this.color.accent : this.color.soft;
    c.lineWidth = strong ? 2.5 : 2;
    const width = Math.max(3, (lane.end[index] - lane.start[index]) * per);
    c.beginPath();
    c.roundRect(x(lane.start[index]), topOf(row, lane.row[index]) - 1, width, row.height + 2, 4);
    c.stroke();
    c.lineWidth = 1;
  }

  axis(surface, view, width) {
    const c = surface.resize(width, 24);
    const per = (width - GUTTER - RIGHT) / (view.to - view.from);
    c.font = `12px ${this.font}`;
    c.textBaseline = "middle";
    c.fillStyle = this.color.soft;
    const all = ticks(view, width - GUTTER), step = all[1] - all[0] || view.to - view.from;
    const [unit, name] = unitOf(view.to - view.from);
    const decimals = Math.max(0, Math.min(6, Math.ceil(-Math.log10(step / unit) - 1e-9)));
    c.fillText(`time [${name}]`, 0, 13);
    c.textAlign = "center";
    for (const tick of all) c.fillText((tick / unit).toFixed(decimals), GUTTER + (tick - view.from) * per, 13);
    c.textAlign = "start";
    if (!view.range) return;
    c.save();
    c.beginPath();
    c.rect(GUTTER, 0, width - GUTTER - RIGHT, 24);
    c.clip();
    this.range(c, view.range.map((time) => GUTTER + (time - view.from) * per), 24);
    c.restore();
  }

  /** The whole run in a strip, with the part that the chart shows. */
  overview(surface, view, width) {
    const height = 44, c = surface.resize(width, height), per = (width - GUTTER - RIGHT) / this.model.duration;
    const shown = this.model.views.filter((v) => v.shown).slice(0, 1);
    const rowHeight = (height - 12) / this.model.numRanks;
    c.fillStyle = this.color.row;
    c.fillRect(GUTTER, 6, this.model.duration * per, height - 12);
    for (const each of shown) {
      each.lanes.forEach(([main], rank) => {
        const row = { lane: main, top: 6 + rank * rowHeight, height: Math.max(1, rowHeight - (rowHeight > 4 ? 1 : 0)) };
        this.strip(c, row, per);
      });
    }
    const left = GUTTER + view.from * per, right = GUTTER + view.to * per;
    c.fillStyle = this.color.card;
    c.globalAlpha = 0.72;
    c.fillRect(GUTTER, 4, left - GUTTER, height - 8);
    c.fillRect(right, 4, width - RIGHT - right, height - 8);
    c.globalAlpha = 1;
    c.strokeStyle = this.color.accent;
    c.lineWidth = 1.5;
    c.beginPath();
    c.roundRect(left, 3, Math.max(3, right - left), height - 6, 4);
    c.stroke();
    c.lineWidth = 1;
  }

  strip(c, { lane, top, height }, per) {
    let drawn = -1;
    for (let i = 0; i < lane.length; i++) {
      const left = GUTTER + lane.start[i] * per, right = GUTTER + lane.end[i] * per;
      if (right <= drawn || lane.meaning[i].kind === "idle" || (this.hits && !this.hits.get(lane)?.has(i))) continue;
      c.fillStyle = this.fill(lane.meaning[i]);
      const from = Math.max(left, drawn);
      c.fillRect(from, top, Math.max(0.7, right - from), height);
      drawn = Math.max(right, from + 0.7);
    }
  }
}
