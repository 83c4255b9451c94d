"use strict";
// The schedules of `plan/schedules.py` and `plan/zero_bubble.py` once more, and where DP.sync starts
// and is waited for. A test compares plans of all sizes with Python's.

/** Where the sliders end; the test goes as far. */
const LARGEST = { p: 12, m: 32, ns: 6 };

const numbers = (count, first = 0) => Array.from({ length: count }, (_, i) => first + i);
const actionsOf = (op, stages, microbatches) =>
  stages.flatMap((stage) => microbatches.map((microbatch) => ({ stage, op, microbatch })));
const spellAction = ({ stage, op, microbatch }) => `${stage}${op}${microbatch ?? ""}`;

/** `ahead` forwards, then one forward and one backward in turn, then what is left. */
function alternate(forwards, backwards, ahead) {
  const first = Math.min(ahead, forwards.length), steady = forwards.length - first;
  const turns = numbers(steady).flatMap((i) => [forwards[first + i], backwards[i]]);
  return [...forwards.slice(0, first), ...turns, ...backwards.slice(steady)];
}

const oneForwardOneBackward = (stage, m, ahead) =>
  alternate(actionsOf("F", [stage], numbers(m)), actionsOf("B", [stage], numbers(m)), ahead);

/** Groups of `size` micro-batches; a remainder below p is spread over the others. */
function groupsOf(m, size, p) {
  const whole = Math.floor(m / size), count = Math.max(whole, 1);
  const bounds = m - whole * size >= p
    ? [...numbers(Math.ceil(m / size)).map((i) => i * size), m]
    : numbers(count + 1).map((i) => Math.floor((m * i) / count));
  return bounds.slice(1).map((end, i) => numbers(end - bounds[i], bounds[i]));
}

function interleaved(rank, { p, m, ns }, size) {
  const stages = numbers(ns).map((segment) => segment * p + rank), groups = groupsOf(m, size, p);
  const forwards = groups.flatMap((group) => actionsOf("F", stages, group));
  const backwards = groups.flatMap((group) => actionsOf("B", stages.toReversed(), group));
  const lengths = groups.map((group) => group.length);
  let ahead = 2 * (p - 1 - rank);
  if (ns > 1 && groups.length > 1) ahead = Math.min(ahead, 2 * Math.min(...lengths));
  return alternate(forwards, backwards, ahead + (ns - 1) * Math.max(...lengths));
}

function aiao(rank, { p, m, ns }) {
  const stages = numbers(ns).map((segment) => segment * p + rank), last = stages.pop();
  return [...actionsOf("F", stages, numbers(m)), ...oneForwardOneBackward(last, m, 2 * (p - 1 - rank)),
    ...actionsOf("B", stages.toReversed(), numbers(m))];
}

function afab(rank, { p, m, ns }) {
  const stages = numbers(ns).map((segment) => segment * p + rank);
  return [...actionsOf("F", stages, numbers(m)), ...actionsOf("B", stages.toReversed(), numbers(m))];
}

function shiftedCriticalPath(rank, { p, m }) {
  const order = oneForwardOneBackward(rank, m, p - 1 - rank);
  if (p - 1 - rank === 1 && m > 2) [order[2], order[3]] = [order[3], order[2]];
  return order;
}

/** 1F1B whose weight gradients come so many backwards late. */
function zeroBubble(rank, { p, m }, forwardsAhead) {
  const late = Math.min(forwardsAhead * rank, m), weight = (microbatch) => ({ stage: rank, op: "W", microbatch });
  const order = oneForwardOneBackward(rank, m, forwardsAhead * (p - 1 - rank)).flatMap((action) =>
    (action.op === "B" && action.microbatch >= late ? [action, weight(action.microbatch - late)] : [action]));
  return [...order, ...numbers(late, m - late).map(weight)];
}

const SCHEDULES = {
  "1f1b": { short: "1F1B", title: "1F1B", oneSegment: true, about: "One forward and one backward in turn.",
    program: (rank, { p, m }) => oneForwardOneBackward(rank, m, p - 1 - rank) },
  interleaved: { short: "interleaved", title: "Interleaved 1F1B", about: "Groups of p micro-batches pass all segments before the next group starts.",
    program: (rank, sizes) => interleaved(rank, sizes, sizes.p) },
  aiao: { short: "AIAO", title: "AIAO, all-in-all-out", about: "All micro-batches pass a segment before the next one: its DP.sync has the other segments to hide behind.",
    program: aiao },
  "breadth-first": { short: "breadth-first", title: "Breadth-first", about: "Interleaved 1F1B with one group of all micro-batches.",
    program: (rank, sizes) => interleaved(rank, sizes, sizes.m) },
  afab: { short: "AFAB", title: "All forwards, all backwards", about: "No backward before the last forward; with one segment it is GPipe.", program: afab },
  "shifted-critical-path": { short: "shifted", title: "Shifted critical path", oneSegment: true, about: "1F1B whose last rank but one runs a forward earlier.",
    program: shiftedCriticalPath },
  "zb-h1": { short: "ZB-H1", title: "Zero Bubble H1", oneSegment: true, about: "1F1B that computes weight gradients apart, where it would wait.",
    program: (rank, sizes) => zeroBubble(rank, sizes, 1) },
  "zb-h2": { short: "ZB-H2", title: "Zero Bubble H2", oneSegment: true, about: "Further ahead than H1: less bubble, nearly twice the activations.",
    program: (rank, sizes) => zeroBubble(rank, sizes, 2) },
};

/** The sizes with which a schedule runs: some have one segment only. */
const sizesOf = (name, { p, m, ns }) => ({ p, m, ns: SCHEDULES[name].oneSegment ? 1 : ns });

/** One program per rank: `where` DP.sync goes is serial, overlap or deferred. */
function planOf(name, sizes, where) {
  return numbers(sizes.p).map((rank) => withSync(SCHEDULES[name].program(rank, sizes), where));
}

function withSync(program, where) {
  const last = new Map();
  program.forEach(({ stage, op }, i) => { if (op !== "F") last.set(stage, i); });
  const inOrder = [...last.keys()].sort((a, b) => last.get(a) - last.get(b));
  const reduce = (stage) => ({ stage, op: "REDUCE_GRAD" }), wait = (stage) => ({ stage, op: "WAIT_GRAD" });
  if (where === "serial") return [...program, ...inOrder.map(reduce), ...inOrder.map(wait)];
  const begun = new Set();
  const synced = program.flatMap((action, i) => {
    const found = [action];
    if (last.get(action.stage) === i) found.push(reduce(action.stage));
    if (where === "deferred" && action.op === "F" && !begun.has(action.stage)) {
      begun.add(action.stage);
      found.unshift(wait(action.stage));
    }
    return found;
  });
  return where === "deferred" ? synced : [...synced, ...inOrder.map(wait)];
}

/** The most micro-batches whose activations a rank holds at once, counting a segment as its part. */
function mostHeld(programs, ns) {
  return Math.max(...programs.map((program) => {
    const frees = program.some(({ op }) => op === "W") ? "W" : "B";
    let held = 0, most = 0;
    for (const { op } of program) {
      if (op === "F") most = Math.max(most, (held += 1));
      else if (op === frees) held -= 1;
    }
    return most / ns;
  }));
}
