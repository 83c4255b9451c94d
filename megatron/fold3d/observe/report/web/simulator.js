"use strict";
// `predict/simulator` once more, without what the page has no slider for: events in the same order, so
// that times agree with Python's. A test compares both. The unit of time is the caller's.

class Clock {
  constructor() { Object.assign(this, { now: 0, heap: [], planned: 0 }); }

  at(time, happen) {
    const heap = this.heap, event = { time, number: this.planned++, happen };
    let i = heap.push(event) - 1;
    for (let up; i && before(event, heap[(up = (i - 1) >> 1)]); i = up) heap[i] = heap[up];
    heap[i] = event;
  }

  next() {
    const heap = this.heap, first = heap[0], moved = heap.pop();
    if (!heap.length) return first;
    let i = 0;
    for (let down; (down = 2 * i + 1) < heap.length; i = down) {
      if (down + 1 < heap.length && before(heap[down + 1], heap[down])) down++;
      if (!before(heap[down], moved)) break;
      heap[i] = heap[down];
    }
    heap[i] = moved;
    return first;
  }

  run(between) {
    between();
    while (this.heap.length) {
      this.now = this.heap[0].time;
      while (this.heap.length && this.heap[0].time === this.now) this.next().happen();
      between();
    }
  }
}

const before = (a, b) => a.time < b.time || (a.time === b.time && a.number < b.number);

/** NICs, two links each, and what flows through them: fair shares, or messages before DP.sync. */
class Network {
  constructor(clock, nics, messagesFirst) {
    Object.assign(this, { clock, messagesFirst, touched: new Map() });
    this.flows = numbers(2 * nics).map(() => new Set());
    this.background = numbers(nics).map(() => new Set());
  }

  message(source, target, work, done) { return this.flow([2 * source, 2 * target + 1], work, done, false); }
  collective(nic, work, done) { return this.flow([2 * nic, 2 * nic + 1], work, done, this.messagesFirst); }
  flow(links, remaining, done, background) { return { links, remaining, done, background, rate: 0, since: 0, ends: Infinity }; }

  start(flow) {
    flow.since = this.clock.now;
    for (const flows of this.of(flow)) flows.add(flow);
    for (const link of flow.links) this.touched.set(link);
  }

  stop(flow) {
    this.setRate(flow, 0);
    for (const flows of this.of(flow)) flows.delete(flow);
    for (const link of flow.links) this.touched.set(link);
  }

  of({ background, links }) { return background ? [this.background[links[0] >> 1]] : links.map((link) => this.flows[link]); }

  updateRates() {
    const nics = new Set();
    while (this.touched.size) {
      const link = [...this.touched.keys()].at(-1), flows = this.flows[link];
      this.touched.delete(link);
      nics.add(link >> 1);
      if (!flows.size) continue;
      const [links, all] = this.component(link);
      for (const other of links) {
        this.touched.delete(other);
        nics.add(other >> 1);
      }
      for (const [flow, rate] of this.fairRates(links, all)) this.setRate(flow, rate);
    }
    for (const nic of nics) {
      const waiting = this.background[nic];
      const used = Math.max(...[0, 1].map((i) => [...this.flows[2 * nic + i]].reduce((sum, flow) => sum + flow.rate, 0)));
      for (const flow of waiting) this.setRate(flow, Math.max(0, 1 - used) / waiting.size);
    }
  }

  /** All links and flows that share with a link, directly or through others. */
  component(link) {
    const links = new Set([link]), flows = new Set(), queue = [link];
    while (queue.length) {
      for (const flow of this.flows[queue.pop()]) {
        flows.add(flow);
        for (const other of flow.links) if (!links.has(other)) { links.add(other); queue.push(other); }
      }
    }
    return [links, flows];
  }

  /** Max-min fair: the fullest links' flows get equal shares, then the next ones'. */
  fairRates(links, left) {
    const free = new Map(), count = new Map(), found = [];
    for (const link of links) { free.set(link, 1); count.set(link, this.flows[link].size); }
    while (left.size) {
      const shares = [...count].filter(([, n]) => n).map(([link, n]) => [free.get(link) / n, link]);
      const rate = Math.min(...shares.map(([share]) => share));
      for (const [share, bottleneck] of shares) {
        if (share !== rate) continue;
        for (const flow of this.flows[bottleneck]) {
          if (!left.delete(flow)) continue;
          found.push([flow, rate]);
          for (const link of flow.links) {
            free.set(link, Math.max(0, free.get(link) - rate));
            count.set(link, count.get(link) - 1);
          }
        }
      }
    }
    return found;
  }

  setRate(flow, rate) {
    if (rate === flow.rate) return;
    const now = this.clock.now;
    flow.remaining = Math.max(0, flow.remaining - flow.rate * (now - flow.since));
    flow.since = now;
    flow.rate = rate;
    flow.ends = rate > 0 ? now + flow.remaining / rate : Infinity;
    if (rate > 0) this.clock.at(flow.ends, () => this.end(flow));
  }

  end(flow) {
    if (flow.ends !== this.clock.now || flow.rate <= 0) return; // its end has moved
    flow.remaining = 0;
    this.stop(flow);
    flow.done();
  }
}

/** DP.sync of a rank: one task at a time. With `earliestFirst` what is needed earlier interrupts. */
class SyncQueue {
  constructor(run, rank, earliestFirst) { Object.assign(this, { run, rank, earliestFirst, waiting: [], active: null, since: 0 }); }

  add(action, iteration, work) {
    const { network } = this.run, task = { action, iteration, number: this.run.clock.planned++ };
    task.flow = network.collective(this.rank.number, work, () => this.end());
    this.waiting.push(task);
    if (this.active && this.earlier(task, this.active) && this.earliestFirst) {
      network.stop(this.active.flow);
      this.waiting.push(this.leave());
    }
    this.next();
  }

  earlier(a, b) {
    if (this.earliestFirst && a.iteration !== b.iteration) return a.iteration < b.iteration;
    if (this.earliestFirst && a.action.stage !== b.action.stage) return a.action.stage < b.action.stage;
    return a.number < b.number;
  }

  next() {
    if (this.active || !this.waiting.length) return;
    this.active = this.waiting.reduce((first, task) => (this.earlier(task, first) ? task : first));
    this.waiting.splice(this.waiting.indexOf(this.active), 1);
    this.since = this.run.clock.now;
    this.run.network.start(this.active.flow);
  }

  end() {
    const task = this.leave();
    this.next();
    this.run.comeTrue(`SYNC ${task.action.stage}`, this.rank, task.action);
  }

  leave() {
    const task = this.active;
    this.active = null;
    this.run.write(this.rank, "grad_sync", this.since, task.action, task.iteration);
    return task;
  }
}

/** Ranks that run their programs in order, each waiting for its messages and for its sums. */
class Run {
  constructor(programs, ns, costs, { where, messagesFirst }, iterations) {
    Object.assign(this, { costs, iterations, stages: programs.length * ns, deferred: where === "deferred" });
    this.clock = new Clock();
    this.network = new Network(this.clock, programs.length, messagesFirst);
    this.channels = new Map();
    this.times = new Map(); // how often a fact has come true
    this.atEnd = [];
    this.split = programs.some((program) => program.some(({ op }) => op === "W"));
    this.ranks = programs.map((program, number) => ({ number, program, spans: [], iteration: 0, position: 0, since: 0, awaits: null }));
    for (const rank of this.ranks) rank.queue = new SyncQueue(this, rank, this.deferred);
    for (const rank of this.ranks) this.advance(rank);
    this.clock.run(() => this.network.updateRates());
    for (const rank of this.ranks) rank.spans.sort((a, b) => a.start - b.start);
  }

  count(fact) { return this.times.get(fact) ?? 0; }

  advance(rank) {
    while (rank.iteration < this.iterations) {
      if (rank.position === rank.program.length) {
        if (!this.deferred) { this.meet(rank); return; }
        this.nextIteration(rank);
        continue;
      }
      const action = rank.program[rank.position], input = this.inputOf(action);
      if (input && this.count(input) <= rank.iteration) { rank.awaits = input; return; }
      if (this.secondsOf(action) !== undefined) {
        rank.since = this.clock.now;
        this.clock.at(rank.since + this.secondsOf(action), () => this.finish(rank));
        return;
      }
      const fact = `SYNC ${action.stage}`, ago = this.deferred ? 1 : 0;
      if (action.op === "ALL_REDUCE") rank.queue.add(action, rank.iteration, this.costs.sync);
      if (action.op === "STEP" && this.count(fact) <= rank.iteration - ago) { rank.awaits = fact; return; }
      this.goOn(rank); // what Megatron reads at the end has no slider: it takes no time
    }
  }

  secondsOf({ op }) {
    const { forward, backward } = this.costs;
    return { F: forward, B: this.split ? backward - backward / 2 : backward, W: backward / 2 }[op];
  }

  inputOf({ stage, op, microbatch }) {
    if (op === "F" && stage > 0) return `F ${stage} ${microbatch}`;
    return op === "B" && stage + 1 < this.stages ? `B ${stage} ${microbatch}` : null;
  }

  comeTrue(fact, rank, sum = null) {
    this.times.set(fact, this.count(fact) + 1);
    if (rank.awaits !== fact) return;
    rank.awaits = null;
    if (sum) {
      this.write(rank, "wait", rank.since, sum, rank.iteration);
      rank.since = this.clock.now;
    }
    this.advance(rank);
  }

  goOn(rank) {
    rank.position += 1;
    rank.since = this.clock.now;
  }

  nextIteration(rank) {
    rank.iteration += 1;
    rank.position = 0;
    rank.since = this.clock.now;
  }

  /** At the end of an iteration all ranks wait for the last one. */
  meet(rank) {
    this.atEnd.push(rank);
    if (this.atEnd.length < this.ranks.length) return;
    const ranks = this.atEnd;
    this.atEnd = [];
    for (const each of ranks) {
      this.write(each, "wait", each.since, null, each.iteration);
      this.nextIteration(each);
    }
    for (const each of ranks) this.advance(each);
  }

  finish(rank) {
    const action = rank.program[rank.position];
    this.write(rank, "compute", rank.since, action, rank.iteration);
    this.send(rank, action);
    this.goOn(rank);
    this.advance(rank);
  }

  send(sender, { stage, op, microbatch }) {
    const to = op === "F" ? stage + 1 : stage - 1;
    if (op === "W" || to < 0 || to >= this.stages) return;
    const receiver = this.ranks[to % this.ranks.length], fact = `${op} ${to} ${microbatch}`;
    if (receiver === sender) { this.comeTrue(fact, receiver); return; }
    const message = { sender, receiver, fact, action: { stage: to, op: `RECV_${op}`, microbatch }, left: this.clock.now };
    if (!this.costs.transfer) { this.clock.at(this.clock.now, () => this.arrive(message)); return; }
    const key = `${sender.number} ${receiver.number} ${op}`;
    if (!this.channels.has(key)) this.channels.set(key, []);
    message.channel = this.channels.get(key);
    if (message.channel.push(message) === 1) this.transfer(message);
  }

  transfer(message) {
    this.network.start(this.network.message(message.sender.number, message.receiver.number, this.costs.transfer, () => this.arrive(message)));
  }

  arrive(message) {
    message.channel?.shift();
    if (message.channel?.length) this.transfer(message.channel[0]);
    this.write(message.receiver, "p2p", message.left, message.action, this.count(message.fact));
    this.comeTrue(message.fact, message.receiver);
  }

  write(rank, lane, start, action, iteration) {
    if (this.clock.now > start) rank.spans.push({ lane, start, end: this.clock.now, action, iteration });
  }
}

const isBusy = ({ lane }) => lane === "compute" || lane === "wait";

/** The ends of a rank's iterations. */
function endsOf(spans) {
  const ends = [];
  for (const span of spans) if (isBusy(span)) ends[span.iteration] = Math.max(span.end, ends[span.iteration] ?? 0);
  return ends;
}

/** Simulate a plan until an iteration takes as long as the one before; returns its ranks' spans. */
function simulate(programs, ns, costs, execution) {
  for (let iterations = execution.where === "deferred" ? 3 : 1; ; iterations *= 2) {
    const ranks = new Run(programs, ns, costs, execution, iterations).ranks.map((rank) => rank.spans);
    const [end, start, earlier] = [...endsOf(ranks[0]).toReversed(), 0, 0];
    const settled = Math.abs(end - start - (start - earlier)) <= 1e-6 * (end - start);
    if (settled || iterations === 1 || iterations >= 24) return { ranks, from: start, to: end };
  }
}

/** Where the time of the last iteration goes, mean over ranks: bubble, exposed DP.sync and PP.sync. */
function exposureOf({ ranks }) {
  const makespan = Math.max(...ranks.flatMap((spans) => spans.filter(isBusy).map((span) => span.end)), 0);
  const rows = ranks.map((all) => {
    const ends = endsOf(all), number = ends.length - 1, spans = all.filter((span) => span.iteration === number);
    const row = { compute: 0, bubble: 0, sync: 0, transfer: 0 };
    const arrivals = new Map(spans.filter(({ lane }) => lane === "p2p").map((span) => [spellAction(span.action), span]));
    let free = ends[number - 1] ?? 0;
    for (const span of spans.filter(isBusy)) {
      if (span.start > free) {
        const { stage, op, microbatch } = span.action ?? {}, message = arrivals.get(`${stage}RECV_${op}${microbatch}`);
        const exposed = message ? Math.max(0, Math.min(span.start, message.end) - Math.max(free, message.start)) : 0;
        row.transfer += exposed;
        row.bubble += span.start - free - exposed;
      }
      row[span.lane === "compute" ? "compute" : span.action ? "sync" : "bubble"] += span.end - span.start;
      free = span.end;
    }
    if (ends.length === 1) row.bubble += makespan - free;
    return row;
  });
  return Object.fromEntries(Object.keys(rows[0]).map((key) => [key, rows.reduce((sum, row) => sum + row[key], 0) / rows.length]));
}
