"use strict";
// What the diagram shows: spans in columns, lanes in rows. Times are microseconds from the start.

/** Read one word: an action such as 2F0, or what a rank does beside: "wait 2ALL_REDUCE", "optimizer 2". */
function parse(word, numRanks) {
  const action = /^(\d+)([A-Z_]+?)(?::\d+|(\d*))$/.exec(word);
  if (action) {
    const stage = +action[1], { kind, title: name } = OPS[action[2]] ?? { kind: "wait", title: action[2] };
    return { kind, name, stage, segment: Math.floor(stage / numRanks), microbatch: action[3] ?? "" };
  }
  const layer = { tp_sync: "TP.sync", ep_sync: "EP.sync" }[word];
  if (layer) return { kind: "tp", name: layer, segment: 0, microbatch: "" };
  const [kind, at] = word.split(" ");
  const [, stage, op, microbatch] = /^(\d+)([A-Z_]*?)(?::\d+|(\d*))$/.exec(at ?? "") ?? [];
  const segment = stage === undefined ? -1 : Math.floor(+stage / numRanks);
  if (kind === "optimizer") return { kind: "update", name: "optimizer step", segment, microbatch: "" };
  if (segment < 0) return { kind: "idle", name: "end of the iteration: waits for the other ranks", segment, microbatch: "" };
  const { kind: waited, waits: name } = OPS[op] ?? { kind: "sync", waits: `waits at ${at}` };
  return { kind: "wait", waited, name, segment, microbatch: microbatch ?? "" };
}

const ROUNDING = 0.15; // of times as they are embedded
const MOST_ROWS = 8; // of a lane; messages that lie waiting would fill a screen

/** The spans of one lane of one rank in one view, in the order of their start. */
class Lane {
  constructor(view, rank, name, columns, meaning) {
    Object.assign(this, { view, rank, name, words: columns.word, meaning });
    this.own = { start: Float64Array.from(columns.start), end: Float64Array.from(columns.end) };
    this.path = new Uint8Array(this.length);
    this.place((time) => time);
    this.stack();
  }

  get length() { return this.own.start.length; }

  /** Draw each of its own times at another one; `moved` and `movedEnd` keep their order. */
  place(moved, movedEnd = moved) {
    this.start = this.own.start.map((time) => moved(time));
    this.end = this.own.end.map((time, i) => Math.max(this.start[i], movedEnd(time)));
    this.reach = this.end.slice(); // the latest end so far: spans may overlap
    for (let i = 1; i < this.length; i++) this.reach[i] = Math.max(this.reach[i], this.reach[i - 1]);
  }

  /** Give spans that overlap rows of their own: each the first row that is free, or the last there may be. */
  stack() {
    const { start, end } = this.own, free = [];
    this.row = new Uint16Array(this.length);
    for (let i = 0; this.name !== "compute" && i < this.length; i++) {
      let row = free.findIndex((time) => time <= start[i] + ROUNDING);
      if (row < 0) row = Math.min(free.length, MOST_ROWS - 1);
      free[row] = Math.max(end[i], free[row] ?? 0);
      this.row[i] = row;
    }
    this.depth = Math.max(1, free.length);
  }

  /** The first span that may still run at a time. */
  firstAfter(time) { return lowerBound(this.reach, time); }

  /** The span at a time in a row, or -1. */
  at(time, tolerance, row) {
    let best = -1, distance = tolerance;
    for (let i = this.firstAfter(time - tolerance); i < this.length && this.start[i] <= time + tolerance; i++) {
      if (this.row[i] !== row) continue;
      const away = Math.max(this.start[i] - time, time - this.end[i], 0);
      if (away <= distance) { best = i; distance = away; }
    }
    return best;
  }
}

/** The first index of a sorted column with a value above another. */
function lowerBound(column, value) {
  let low = 0, high = column.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (column[middle] > value) high = middle; else low = middle + 1;
  }
  return low;
}

/** All of it, as `page.py` wrote it. */
class Model {
  constructor(data) {
    this.numRanks = data.num_ranks;
    this.numSegments = data.num_segments;
    this.palette = data.palette;
    this.meanings = new Map();
    this.views = data.views.map((view, v) => ({
      name: view.name,
      ends: view.ends,
      shown: true,
      lanes: view.ranks.map((lanes, rank) => Object.entries(lanes).map(
        ([name, columns]) => new Lane(v, rank, name, columns, columns.word.map((word) => this.meaning(word))))),
      path: view.path,
    }));
    for (const view of this.views) {
      view.path = view.path.map(([rank, lane, index]) => ({ lane: view.lanes[rank].find((l) => l.name === lane), index }));
      for (const { lane, index } of view.path) lane.path[index] = 1;
    }
    this.counterparts = new Map();
    this.canAlign = this.views.length > 1 && Math.min(...this.views.map((view) => view.ends.length)) > 1;
    this.align(this.canAlign);
  }

  /** Let iterations of the same number begin at the same time in all views, or each at its own. */
  align(aligned) {
    this.aligned = aligned;
    const lengths = this.views.map((view) => view.ends.map((end, i) => end - (view.ends[i - 1] ?? 0)));
    const longest = (i) => Math.max(...lengths.map((each) => each[i] ?? 0));
    for (const view of this.views) {
      let begin = 0;
      const begins = view.ends.map((_, i) => { const at = begin; begin += longest(i); return at; });
      // What begins at a border belongs to the iteration behind it, what ends there to the one before.
      const moved = (slack) => (time) => {
        const i = Math.min(lowerBound(view.ends, time + slack), begins.length - 1);
        return time - (view.ends[i - 1] ?? 0) + begins[i];
      };
      const own = (time) => time, [start, end] = aligned ? [moved(ROUNDING), moved(-ROUNDING)] : [own, own];
      view.borders = view.ends.map((time) => end(time));
      view.begins = view.borders.map((time, i) => time - lengths[this.views.indexOf(view)][i]);
      for (const lane of view.lanes.flat()) lane.place(start, end);
    }
    this.duration = Math.max(1e-3, ...this.views.flatMap((view) => view.lanes.flat()).map((lane) => lane.reach.at(-1) ?? 0));
  }

  /** What a view's ranks did in a range, by its name: microseconds of all ranks, and how many actions. */
  statistics(view, from, to) {
    const found = new Map();
    let busy = 0;
    for (const lane of view.lanes.flat()) {
      for (let i = lane.firstAfter(from); i < lane.length && lane.start[i] < to; i++) {
        const time = Math.min(lane.end[i], to) - Math.max(lane.start[i], from), meaning = lane.meaning[i];
        if (time <= 0 || meaning.kind === "idle") continue;
        const entry = found.get(meaning.name) ?? { meaning, time: 0, count: 0, beside: lane.name !== "compute" };
        entry.time += time;
        entry.count += 1;
        found.set(meaning.name, entry);
        if (!entry.beside) busy += time;
      }
    }
    const inside = view.begins.reduce((sum, begin, i) => sum + Math.max(0, Math.min(to, view.borders[i]) - Math.max(from, begin)), 0);
    const bubble = view.lanes.length * inside - busy;
    found.set("bubble", { meaning: { kind: "row" }, time: Math.max(0, bubble), count: null, beside: false });
    return found;
  }

  /** The actions of the shown views that a reader looks for, by time: "2F0", "rank 1, waits". */
  search(text) {
    const terms = text.split(",").map((term) => term.trim()).filter(Boolean).map(matcher);
    const hits = [];
    if (!terms.length) return hits;
    for (const view of this.views) {
      if (!view.shown) continue;
      for (const lane of view.lanes.flat()) {
        const known = new Map();
        lane.words.forEach((word, index) => {
          if (!known.has(word)) {
            const { name, segment, microbatch, kind } = lane.meaning[index];
            const place = `rank ${lane.rank} segment ${segment} micro-batch ${microbatch} ${view.name}`;
            known.set(word, kind !== "idle" && terms.every((matches) => matches(word, `${name} ${place}`)));
          }
          if (known.get(word)) hits.push({ lane, index });
        });
      }
    }
    return hits.sort((a, b) => a.lane.start[a.index] - b.lane.start[b.index]);
  }

  meaning(word) {
    if (!this.meanings.has(word)) this.meanings.set(word, parse(word, this.numRanks));
    return this.meanings.get(word);
  }

  /** The same action, as often repeated, in the other view: where measured and simulated differ. */
  counterpart(lane, index) {
    const other = this.views.length === 2 ? this.views[1 - lane.view] : null;
    const twin = other?.lanes[lane.rank].find((l) => l.name === lane.name);
    if (!twin) return null;
    for (const each of [lane, twin]) if (!this.counterparts.has(each)) this.counterparts.set(each, occurrences(each.words));
    const name = this.counterparts.get(lane).names[index];
    const found = this.counterparts.get(twin).indexes.get(name);
    return found === undefined ? null : { lane: twin, index: found };
  }
}

/** A term matches an action's word as a whole, or whole numbers and beginnings of words in its name. */
function matcher(term) {
  const literal = term.replace(/[.*+?^${}()|[\]\\]/g, "\\$&");
  const named = new RegExp(`(^|[^a-z0-9])${literal}${/\d$/.test(term) ? "(?!\\d)" : ""}`, "i");
  return (word, name) => word.split(" ").some((each) => each.toLowerCase() === term.toLowerCase()) || named.test(name);
}

/** Name each word by how often it has come. A rank need not wait in each iteration: waits are named by theirs. */
function occurrences(words) {
  const count = new Map(), names = [], indexes = new Map(), first = words.find((word) => /^\d/.test(word));
  words.forEach((word, i) => {
    const named = word.startsWith("wait") ? `${word} in ${count.get(first) ?? 0},` : word;
    const times = (count.get(named) ?? 0) + 1;
    count.set(named, times);
    names.push(`${named} ${times}`);
    indexes.set(names[i], i);
  });
  return { names, indexes };
}

/** The unit in which times of a magnitude read best. */
function unitOf(microseconds) {
  return microseconds >= 1e6 ? [1e6, "s"] : microseconds >= 1e3 ? [1e3, "ms"] : [1, "µs"];
}

/** A time as text, in the unit of another one. */
function spell(microseconds, like = microseconds, digits = 4) {
  const [unit, name] = unitOf(Math.abs(like));
  return `${+(microseconds / unit).toPrecision(digits)} ${name}`;
}
