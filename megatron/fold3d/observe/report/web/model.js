"use strict";
// What the diagram shows: spans in columns, lanes in rows. Times are microseconds from the start.

const KINDS = {
  F: ["forward", "forward"], B: ["backward", "backward"], W: ["weight", "weight gradient"],
  R: ["recompute", "recomputation"],
  REDUCE_GRAD: ["sync", "DP.sync of the gradients"], GATHER_PARAM: ["sync", "DP.sync of the parameters"],
  GATHER_PARAM_B: ["sync", "DP.sync of the parameters, for backwards"],
  OFFLOAD: ["copy", "copy to the host"], RELOAD: ["copy", "copy from the host"],
  RECV_F: ["p2p", "PP.sync of a forward"], RECV_B: ["p2p", "PP.sync of a backward"],
};

/** Read one word: an action such as 2F0, or what a rank does beside: "wait 2", "optimizer". */
function parse(word, numRanks) {
  const action = /^(\d+)([A-Z_]+?)(?:\.\d{3}|(\d*))$/.exec(word);
  if (action) {
    const stage = +action[1], [kind, name] = KINDS[action[2]] ?? ["wait", action[2]];
    return { kind, name, stage, segment: Math.floor(stage / numRanks), microbatch: action[3] ?? "" };
  }
  if (word === "tp_sync") return { kind: "tp", name: "TP.sync", segment: 0, microbatch: "" };
  const [kind, stage] = word.split(" ");
  const segment = stage === undefined ? -1 : Math.floor(+stage / numRanks);
  const name = kind === "optimizer" ? "optimizer step"
    : segment < 0 ? "end of the iteration: waits for the others" : "waits for DP.sync";
  return { kind: kind === "optimizer" ? "update" : segment < 0 ? "idle" : "wait", name, segment, microbatch: "" };
}

/** The spans of one lane of one rank in one view, in the order of their start. */
class Lane {
  constructor(view, rank, name, columns, meaning) {
    Object.assign(this, { view, rank, name, words: columns.word, meaning });
    this.start = Float64Array.from(columns.start);
    this.end = Float64Array.from(columns.end);
    this.reach = Float64Array.from(columns.end); // the latest end so far: spans may overlap
    for (let i = 1; i < this.reach.length; i++) this.reach[i] = Math.max(this.reach[i], this.reach[i - 1]);
    this.path = new Uint8Array(this.start.length);
  }

  get length() { return this.start.length; }

  /** The first span that may still run at a time. */
  firstAfter(time) { return lowerBound(this.reach, time); }

  /** The span at a time, or -1; of several that overlap the one that began last. */
  at(time, tolerance) {
    let best = -1, distance = tolerance;
    for (let i = this.firstAfter(time - tolerance); i < this.length && this.start[i] <= time + tolerance; i++) {
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
    this.duration = Math.max(1e-3, ...this.views.flatMap((view) => view.lanes.flat()).map((lane) => lane.reach.at(-1) ?? 0));
    this.counterparts = new Map();
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

function occurrences(words) {
  const count = new Map(), names = [], indexes = new Map();
  words.forEach((word, i) => {
    const times = (count.get(word) ?? 0) + 1;
    count.set(word, times);
    names.push(`${word} ${times}`);
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
