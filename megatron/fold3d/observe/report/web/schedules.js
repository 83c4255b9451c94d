"use strict";
// The schedules of `plan/schedules.py` once more, weight gradients in the gaps
// as `plan/passes/place_weight_grads.py` puts them there, and where DP.sync starts and steps are taken.
// A test compares plans of all sizes with Python's.

/** Where the sliders end; the test goes as far. */
const LARGEST = { p: 12, m: 32, ns: 6, ahead: 4 };

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
  "1f1b": { short: "1F1B", title: "1F1B", oneSegment: true, about: "One forward and one backward in turn. Further ahead, it hides longer transfers.",
    program: (rank, { p, m, ahead }) => oneForwardOneBackward(rank, m, ahead * (p - 1 - rank)) },
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
const sizesOf = (name, { p, m, ns, ahead }) => ({ p, m, ns: SCHEDULES[name].oneSegment ? 1 : ns, ahead });

/**
 * One program per rank: `where` DP.sync goes is serial, overlap or deferred. With `gaps`, the times of a
 * plan, weight gradients fill the gaps of a schedule that does not place them itself.
 */
function planOf(name, sizes, where, gaps = null) {
  const order = numbers(sizes.p).map((rank) => SCHEDULES[name].program(rank, sizes));
  const places = order.some((program) => program.some(({ op }) => op === "W"));
  return (gaps && !places ? inGaps(order, sizes.ns, gaps) : order).map((program) => withSync(program, where));
}

/** Split each backward; while a rank waits, or holds as much as any may, it computes the oldest weight gradients. */
function inGaps(programs, ns, { forward, backward, transfer }) {
  const p = programs.length, seconds = { F: forward, B: backward / 2, W: backward / 2 }, rounding = 1e-9;
  const most = mostHeld(programs, 1), arrivals = new Map(), free = new Map(), waiting = new Map();
  const ranks = programs.map((program) => ({ program, position: 0, held: 0, left: [], placed: [] }));
  const due = numbers(p).map((number) => [0, number]);
  const isFirst = ({ stage, op }) => (op === "F" ? stage === 0 : stage === p * ns - 1);

  const weight = (rank, number, now) => {
    rank.placed.push(rank.left.shift());
    rank.held -= 1;
    due.push([now + seconds.W, number]);
  };
  const compute = (rank, number, now, action) => {
    const { stage, op, microbatch } = action, end = now + seconds[op];
    rank.position += 1;
    rank.placed.push(action);
    if (op === "F") rank.held += 1; else rank.left.push({ stage, op: "W", microbatch });
    const reader = { stage: op === "F" ? stage + 1 : stage - 1, op, microbatch }, word = spellAction(reader);
    if (reader.stage >= 0 && reader.stage < p * ns) {
      const link = `${number} ${op}`, arrives = p > 1 ? Math.max(end, free.get(link) ?? 0) + transfer : end;
      free.set(link, arrives);
      arrivals.set(word, arrives);
      if (waiting.has(word)) due.push([now, waiting.get(word)]);
      waiting.delete(word);
    }
    due.push([end, number]);
  };
  while (due.length) {
    const first = due.reduce((a, b) => (b[0] < a[0] || (b[0] === a[0] && b[1] < a[1]) ? b : a));
    due.splice(due.indexOf(first), 1);
    const [now, number] = first, rank = ranks[number], action = rank.program[rank.position];
    if (!action) continue;
    const arrives = isFirst(action) ? -Infinity : arrivals.get(spellAction(action));
    const isFull = action.op === "F" && rank.held + 1 > most;
    const gap = arrives === undefined ? seconds[action.op] + transfer : arrives - now; // at least
    if (isFull) weight(rank, number, now);
    else if (arrives <= now + rounding) compute(rank, number, now, action);
    else if (rank.left.length && seconds.W <= gap + rounding) weight(rank, number, now);
    else if (arrives === undefined) waiting.set(spellAction(action), number);
    else due.push([arrives, number]);
  }
  return ranks.map(({ placed, left }) => [...placed, ...left]);
}

function withSync(program, where) {
  const last = new Map();
  program.forEach(({ stage, op }, i) => { if (op !== "F") last.set(stage, i); });
  const inOrder = [...last.keys()].sort((a, b) => last.get(a) - last.get(b));
  const of = (op) => (stage) => ({ stage, op }), sum = of("ALL_REDUCE"), step = of("STEP");
  if (where === "serial") return [...program, ...inOrder.toSorted((a, b) => a - b).map(sum), ...inOrder.map(step)];
  const begun = new Set();
  const synced = program.flatMap((action, i) => {
    const found = [action];
    if (last.get(action.stage) === i) found.push(...(where === "deferred" ? [of("REDUCE_KEPT")(action.stage)] : []), sum(action.stage));
    if (where === "deferred" && action.op === "F" && !begun.has(action.stage)) {
      begun.add(action.stage);
      found.unshift(step(action.stage));
    }
    return found;
  });
  return [...synced, ...inOrder.map(of(where === "deferred" ? "FINALIZE" : "STEP"))];
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
