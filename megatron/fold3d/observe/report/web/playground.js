"use strict";
// The playground: settings on top, below them a card for each schedule, all on one scale of time.

const byId = (id) => document.getElementById(id);
const PLAY_LEFT = 62, PLAY_RIGHT = 10;

const SLIDERS = [
  { key: "p", name: "Pipeline ranks", symbol: "p", min: 1, max: LARGEST.p, step: 1 },
  { key: "m", name: "Micro-batches", symbol: "m", min: 1, max: LARGEST.m, step: 1 },
  { key: "ns", name: "Segments per rank", symbol: "ns", min: 1, max: LARGEST.ns, step: 1 },
  { key: "ahead", name: "1F1B’s forwards ahead", min: 1, max: LARGEST.ahead, step: 1 },
  { key: "transfer", name: "A transfer takes", min: 0, max: 1, step: 0.02, timed: true },
  { key: "sync", name: "DP.sync takes", min: 0, max: 60, step: 0.5, timed: true },
];
const WHERE = { serial: "after all backwards", overlap: "behind backwards", deferred: "also behind the next forwards" };
const PLAIN = { ahead: 1, gaps: false, first: false, where: "overlap" };
const EXAMPLES = {
  "slow DP.sync": { p: 4, m: 8, ns: 4, transfer: 0.02, sync: 16, first: true },
  "slow transfers": { p: 4, m: 16, ns: 2, transfer: 0.6, sync: 0, ahead: 2, gaps: true },
  "no DP.sync": { p: 4, m: 8, ns: 2, transfer: 0, sync: 0 },
  "deep pipeline": { p: 8, m: 16, ns: 3, transfer: 0.04, sync: 8, where: "deferred", first: true },
};

class Playground {
  constructor(data) {
    Object.assign(this, { data, cards: new Map(), begin: data.settings, examples: { ...EXAMPLES, ...data.presets } });
    this.state = { ...data.settings, shown: [...data.settings.shown], ...this.fromAddress() };
    this.makeControls();
    new ResizeObserver(() => this.redraw()).observe(byId("cards"));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
    this.update();
  }

  // --- settings

  fromAddress() {
    const given = new URLSearchParams(location.hash.slice(1)), found = {};
    for (const { key, min, max, step } of this.sliders()) {
      const value = Number(given.get(key) ?? NaN);
      if (value >= min && value <= max) found[key] = step < 1 ? value : Math.round(value);
    }
    if (given.get("where") in WHERE) found.where = given.get("where");
    for (const key of ["first", "gaps"]) if (given.has(key)) found[key] = given.get(key) === "1";
    const shown = (given.get("shown") ?? "").split(",").filter((name) => name in SCHEDULES);
    return shown.length ? { ...found, shown } : found;
  }

  toAddress() {
    const given = new URLSearchParams({ ...this.state, first: +this.state.first, gaps: +this.state.gaps, shown: this.state.shown.join(",") });
    try { history.replaceState(null, "", `#${given}`); } catch { /* a page inside another one has no address */ }
  }

  /** The sliders; they reach as far as the settings that the page began with. */
  sliders() {
    return SLIDERS.map((slider) => ({ ...slider, max: Math.max(slider.max, this.begin[slider.key]) }));
  }

  makeControls() {
    byId("sliders").innerHTML = this.sliders().map(({ key, name, symbol, min, max, step }) =>
      `<label><span>${name}${symbol ? ` <i>${symbol}</i>` : ""}</span><output id="${key}-value"></output>` +
      `<input type="range" id="${key}" min="${min}" max="${max}" step="${step}"></label>`).join("");
    for (const { key } of SLIDERS) byId(key).addEventListener("input", (event) => this.set({ [key]: Number(event.target.value) }));
    const button = (text, data) => `<button data-${data}="${text}">${WHERE[text] ?? SCHEDULES[text]?.short ?? text}</button>`;
    byId("where").innerHTML = Object.keys(WHERE).map((name) => button(name, "where")).join("");
    byId("examples").innerHTML = Object.keys(this.examples).map((name) => button(name, "example")).join("");
    byId("shown").innerHTML = Object.keys(SCHEDULES).map((name) => button(name, "schedule")).join("");
    const onClick = (id, key, act) => byId(id).addEventListener("click", (event) => {
      const name = event.target.dataset[key];
      if (name) act(name);
    });
    onClick("where", "where", (where) => this.set({ where }));
    onClick("examples", "example", (name) => this.set({ ...PLAIN, ...this.examples[name] }));
    onClick("shown", "schedule", (name) => this.toggle(name));
    for (const key of ["first", "gaps"]) byId(key).addEventListener("change", (event) => this.set({ [key]: event.target.checked }));
  }

  toggle(name) {
    const { shown } = this.state, on = shown.includes(name);
    if (on && shown.length === 1) return; // one stays
    this.set({ shown: Object.keys(SCHEDULES).filter((each) => (each === name ? !on : shown.includes(each))) });
  }

  set(changes) {
    Object.assign(this.state, changes);
    this.frame ??= requestAnimationFrame(() => { this.frame = null; this.update(); });
  }

  // --- simulation

  /** A time as text: in seconds where the page knows how long a forward is, else in forwards. */
  spell(time) {
    return this.data.forward_us ? spell(time * this.data.forward_us, undefined, 3) : String(+time.toPrecision(time < 100 ? 3 : 4));
  }

  simulate(name) {
    const { transfer, sync, where, first, gaps } = this.state, sizes = sizesOf(name, this.state);
    const costs = { forward: 1 / sizes.ns, backward: this.data.backward / sizes.ns, transfer, sync: sync / sizes.ns };
    const programs = planOf(name, sizes, where, gaps && costs);
    const run = simulate(programs, sizes.ns, costs, { where, messagesFirst: first });
    return { ...run, ns: sizes.ns, period: run.to - run.from, exposure: exposureOf(run), held: mostHeld(programs, sizes.ns) };
  }

  update() {
    this.results = new Map(this.state.shown.map((name) => [name, this.simulate(name)]));
    if (this.data.fixed) this.results = new Map([["fixed", this.data.fixed], ...this.results]);
    for (const { key, timed } of SLIDERS) {
      byId(key).value = this.state[key];
      byId(`${key}-value`).textContent = timed ? this.spell(this.state[key]) + (this.data.forward_us ? "" : " forwards") : this.state[key];
    }
    for (const key of ["first", "gaps"]) byId(key).checked = this.state[key];
    for (const button of byId("where").children) button.setAttribute("aria-pressed", button.dataset.where === this.state.where);
    for (const button of byId("shown").children) button.setAttribute("aria-pressed", this.state.shown.includes(button.dataset.schedule));
    this.toAddress();
    this.makeCards();
    this.legend();
    this.redraw();
  }

  // --- cards

  makeCards() {
    const names = [...this.results.keys()];
    if (names.join() !== [...this.cards.keys()].join()) {
      this.cards = new Map(names.map((name) => [name, new Card(name, SCHEDULES[name] ?? this.data.fixed, this)]));
      byId("cards").replaceChildren(...[...this.cards.values()].map((card) => card.element));
    }
    const shortest = Math.min(...[...this.results.values()].map((result) => result.period));
    for (const [name, card] of this.cards) card.say(this.results.get(name), shortest);
  }

  redraw() {
    const longest = Math.max(...[...this.results.values()].map((result) => result.period));
    const style = getComputedStyle(document.documentElement);
    const color = Object.fromEntries(["ink", "soft", "row", "thin", "grid", "update", "waits-sync", "waits-p2p"].map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    const font = getComputedStyle(document.body).fontFamily;
    for (const [name, card] of this.cards) card.draw(this.results.get(name), longest, color, font);
  }

  palette(ns) { return this.data.palettes[ns]; }

  legend() {
    const most = Math.max(...[...this.results.values()].map((result) => result.ns)), palette = this.palette(most);
    const { sync, transfer, shown, gaps } = this.state, fixed = Boolean(this.data.fixed);
    const item = (kind, text) => `<li>${palette[kind].map((c) => `<i style="background:${c}"></i>`).join("")}${text}</li>`;
    const items = [item("forward", "forward"), item("backward", "backward")];
    if (fixed || gaps || shown.some((name) => name.startsWith("zb"))) items.push(item("weight", "weight gradients"));
    const waits = (kind, text) => `<li><i class="waits" style="border-color:var(--waits-${kind})"></i>${text}</li>`;
    if (fixed || sync) items.push(item("sync", "DP.sync"), waits("sync", "waits for DP.sync"));
    if (fixed || transfer) items.push(item("p2p", "PP.sync: transfers to a rank"));
    if (this.data.fixed?.ranks.flat().some((span) => /^wait .*SEND/.test(wordOf(span)))) items.push(waits("p2p", "waits until its transfer has arrived"));
    items.push('<li><i style="background:var(--row)"></i>bubble</li>');
    if (most > 1) items.push('<li class="soft">lighter to darker: first to last segment</li>');
    byId("legend").innerHTML = items.join("");
  }
}

/** An action as a word; "" for the end of an iteration, which is a bubble. */
const wordOf = ({ word, lane, action }) => word ?? (action ? (lane === "wait" ? "wait " : "") + spellAction(action) : "");
const rowOf = (span) => (span.lane === "p2p" ? (wordOf(span).includes("RECV_B") ? "backward messages" : "forward messages") : span.lane);

/** A schedule: its name, its numbers and its diagram. */
class Card {
  constructor(name, { title, about, oneSegment }, page) {
    Object.assign(this, { name, oneSegment, page });
    this.element = document.createElement("section");
    this.element.innerHTML = '<div class="head"><h2></h2><p class="soft small"></p><span class="badge"></span></div>' +
      '<dl></dl><canvas role="img"></canvas>';
    this.element.querySelector("h2").textContent = title;
    this.element.querySelector("p").textContent = about;
    this.element.dataset.name = name;
    this.surface = new Surface(this.element.querySelector("canvas"));
    const { canvas } = this.surface;
    canvas.addEventListener("pointermove", (event) => this.point(event));
    canvas.addEventListener("pointerleave", () => { byId("tip").hidden = true; });
  }

  say(result, shortest) {
    const { period, exposure, held, ns } = result, page = this.page;
    const share = (time) => `${((100 * time) / period).toFixed(1)}%`;
    const longer = period / shortest - 1, badge = this.element.querySelector(".badge");
    badge.textContent = longer < 5e-4 ? "shortest" : `${(100 * longer).toFixed(longer < 0.1 ? 1 : 0)}% longer`;
    badge.classList.toggle("best", longer < 5e-4);
    const unit = page.data.forward_us ? "" : " forwards";
    const facts = [["iteration", page.spell(period) + unit], ["bubble", share(exposure.bubble)], ["exposed DP.sync", share(exposure.sync)],
      ["exposed PP.sync", share(exposure.transfer)], ["holds at most", `${+held.toFixed(2)} micro-batches`]];
    this.element.querySelector("dl").innerHTML = facts.map(([name, value]) => `<div><dt>${name}</dt><dd>${value}</dd></div>`).join("");
    this.surface.canvas.setAttribute("aria-label", `${this.element.querySelector("h2").textContent}: ${facts.map((fact) => fact.join(" ")).join(", ")}`);
    if (this.oneSegment && page.state.ns > 1) badge.textContent += ", one segment";
    this.palette = page.palette(ns);
  }

  draw(result, longest, color, font) {
    const { ranks, from, to } = result, width = this.element.querySelector("canvas").clientWidth;
    if (!width) return;
    const used = new Set(ranks.flatMap((spans) => spans.map(rowOf)));
    const thin = ["forward messages", "backward messages", "grad_sync", "copy"].filter((row) => used.has(row)), main = Math.max(10, Math.min(22, 180 / ranks.length)), small = Math.max(3, main * 0.28);
    const pitch = main + thin.length * (small + 1) + 5, height = ranks.length * pitch + 20;
    const per = (width - PLAY_LEFT - PLAY_RIGHT) / longest, x = (time) => PLAY_LEFT + (time - from) * per;
    const c = this.surface.resize(width, height);
    this.boxes = [];
    // 9 and 10 are written alike: numbers that end in the middle of a row look like an end of the work.
    this.digits = Math.max(1, ...ranks.flatMap((spans) => spans.map((span) => /\d*$/.exec(span.lane === "compute" ? wordOf(span) : "")[0].length)));
    this.color = color;
    c.textBaseline = "middle";
    const unit = this.page.data.forward_us || 1;
    for (const tick of ticks({ from: 0, to: longest * unit }, width - PLAY_LEFT)) {
      const at = Math.round(PLAY_LEFT + (tick / unit) * per);
      c.fillStyle = color.grid;
      c.fillRect(at, 0, 1, height - 16);
      c.font = `11px ${font}`;
      c.fillStyle = color.soft;
      c.textAlign = "center";
      c.fillText(this.page.data.forward_us ? spell(tick, longest * unit) : +tick.toPrecision(6), at, height - 6);
    }
    c.textAlign = "start";
    if (!this.page.data.forward_us) c.fillText("forwards", 0, height - 6);
    ranks.forEach((spans, rank) => {
      const top = rank * pitch;
      c.font = `600 ${Math.min(12.5, main + 1)}px ${font}`;
      c.fillStyle = color.ink;
      c.fillText(`rank ${rank}`, 0, top + main / 2);
      c.fillStyle = color.row;
      c.fillRect(PLAY_LEFT, top, (to - from) * per, main);
      thin.forEach((lane, i) => { c.fillStyle = color.thin; c.fillRect(PLAY_LEFT, top + main + 1 + i * (small + 1), (to - from) * per, small); });
      const free = {}; // a message that waits for the one before it in its direction is not on the link yet
      for (const span of spans) {
        const kind = rowOf(span), i = thin.indexOf(kind), end = Math.min(span.end, to);
        const begin = Math.max(span.start, from, span.lane === "p2p" ? free[kind] ?? 0 : 0);
        if (span.lane === "p2p") free[kind] = span.end;
        if (end <= begin || (span.lane === "wait" && !wordOf(span))) continue;
        const row = i < 0 ? top : top + main + 1 + i * (small + 1);
        this.box(c, { span, rank, left: x(begin), width: (end - begin) * per, top: row, height: i < 0 ? main : small }, ranks.length, font);
      }
    });
    c.strokeStyle = color.soft;
    c.setLineDash([4, 4]);
    c.beginPath();
    c.moveTo(x(to), 0);
    c.lineTo(x(to), height - 16);
    c.stroke();
    c.setLineDash([]);
  }

  box(c, box, numRanks, font) {
    const { span, left, width, top, height } = box;
    const word = wordOf(span), meaning = parse(word, numRanks);
    this.boxes.push({ ...box, word, meaning });
    const shades = this.palette[meaning.kind] ?? [this.color.update], fill = shades[Math.min(meaning.segment, shades.length - 1)];
    const inset = width > 4 ? 0.5 : 0, round = Math.min(3, width / 4, height / 4);
    c.beginPath();
    if (meaning.kind === "wait") {
      c.roundRect(left + 1, top + 0.75, Math.max(1, width - 2), height - 1.5, round);
      c.strokeStyle = this.color[`waits-${meaning.waited}`];
      c.lineWidth = 1.5;
      c.stroke();
      c.lineWidth = 1;
      return;
    }
    c.roundRect(left + inset, top, Math.max(0.7, width - 2 * inset), height, round);
    c.fillStyle = fill;
    c.fill();
    const label = meaning.kind === "sync" ? `DP.sync ${meaning.segment}` : meaning.microbatch, size = Math.min(11.5, height - 1);
    if (size < 7.5 || width < Math.max(label.length, this.digits) * size * 0.6 + 3) return;
    c.font = `${size}px ${font}`;
    c.fillStyle = textOn(fill);
    c.textAlign = "center";
    c.fillText(label, left + width / 2, top + height / 2 + 0.5);
    c.textAlign = "start";
  }

  point(event) {
    const bounds = this.surface.canvas.getBoundingClientRect(), tip = byId("tip");
    const [x, y] = [event.clientX - bounds.left, event.clientY - bounds.top];
    const found = this.boxes?.findLast((box) => x >= box.left - 1 && x <= box.left + box.width + 1 && y >= box.top && y <= box.top + box.height);
    tip.hidden = !found;
    if (!found) return;
    const { span, rank, word, meaning } = found, lines = [`rank ${rank} · segment ${meaning.segment}${meaning.microbatch ? ` · micro-batch ${meaning.microbatch}` : ""}`,
      `takes ${this.page.spell(span.end - span.start)}`];
    tip.replaceChildren(...[["b", span.lane === "wait" ? meaning.name : `${word} – ${meaning.name}`], ...lines.map((line) => ["p", line])].map(([tag, text]) =>
      Object.assign(document.createElement(tag), { textContent: text })));
    tip.style.left = `${Math.max(8, Math.min(event.clientX + 16, window.innerWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${event.clientY + 20 + tip.offsetHeight > window.innerHeight ? event.clientY - tip.offsetHeight - 14 : event.clientY + 20}px`;
  }
}

const playground = new Playground(JSON.parse(byId("data").textContent));
