"use strict";
// What a reader does: zoom, move, point, and the same by keyboard. The diagram is drawn at most once
// per frame, however many events arrive.

const byId = (id) => document.getElementById(id);

class View {
  constructor(model) {
    Object.assign(this, { model, painter: new Painter(model), from: 0, to: model.duration, showPath: true });
    this.surfaces = Object.fromEntries(["overview", "axis", "chart"].map((id) => [id, new Surface(byId(id))]));
    this.hovered = null;
    this.selected = null;
    this.anchor = null; // where the range that is being dragged begins
    this.range = null; // from and to, of the times that are drawn
    this.pointed = null; // the time under the pointer
    this.hits = [];
    this.legend();
    this.listen();
    this.fit();
  }

  // --- drawing

  redraw() {
    this.frame ??= requestAnimationFrame(() => { this.frame = null; this.draw(); });
  }

  draw() {
    this.width = byId("diagram").clientWidth;
    this.painter.makeRoom(byId("chart").getContext("2d"), this.width);
    this.layout = new Layout(this.model, Math.max(320, window.innerHeight * 0.66));
    const chosen = this.selected ?? this.hovered;
    const marked = [];
    if (chosen) {
      const twin = this.model.counterpart(chosen.lane, chosen.index);
      if (twin) marked.push({ ...twin, strong: false });
      marked.push({ ...chosen, strong: true });
    }
    const { overview, axis, chart } = this.surfaces;
    this.painter.right = this.width - RIGHT;
    this.painter.overview(overview, this, this.width);
    this.painter.axis(axis, this, this.width);
    this.painter.chart(chart, this.layout, this, this.width, marked, this.showPath);
    const like = this.to - this.from, [unit, name] = unitOf(like);
    const digits = Math.max(0, 3 - Math.floor(Math.log10(like / unit)));
    const part = [this.from, this.to].map((time) => (time / unit).toFixed(digits)).join(" – ");
    byId("window").textContent = `${part} ${name} of ${spell(this.model.duration)}`;
  }

  legend() {
    const entries = [["forward", "forward"], ["backward", "backward"], ["weight", "weight gradient"],
      ["recompute", "recomputation"], ["sync", "DP.sync"], ["p2p", "PP.sync"], ["tp", "TP.sync, EP.sync"], ["copy", "host copy"]];
    const used = new Set();
    for (const meaning of this.model.meanings.values()) used.add(meaning.kind);
    const item = (colors, text) => `<li>${colors.map((c) => `<i style="background:${c}"></i>`).join("")}${text}</li>`;
    const items = entries.filter(([kind]) => used.has(kind)).map(([kind, text]) => item(this.model.palette[kind], text));
    const waits = new Map([...this.model.meanings.values()].filter((meaning) => meaning.kind === "wait").map((meaning) => [meaning.waited, meaning]));
    for (const [kind, name] of [["sync", "waits for DP.sync"], ["p2p", "waits for a transfer"]]) {
      if (waits.has(kind)) items.push(`<li><i class="waits" style="border-color:var(--waits-${kind})"></i>${name}</li>`);
    }
    if (used.has("update")) items.push(item(["var(--update)"], "optimizer"));
    items.push(item(["var(--row)"], "bubble"));
    if (this.model.numSegments > 1) items.push('<li class="soft">lighter to darker: first to last segment</li>');
    byId("legend").innerHTML = items.join("");
  }

  // --- the window of time

  timeAt(x) { return this.from + ((x - GUTTER) / (this.width - GUTTER - RIGHT)) * (this.to - this.from); }

  show(from, to) {
    const least = this.model.duration / 1e5, length = Math.min(this.model.duration, Math.max(least, to - from));
    this.from = Math.min(Math.max(0, from), this.model.duration - length);
    this.to = this.from + length;
    this.redraw();
  }

  fit() { this.show(0, this.model.duration); }

  zoom(factor, around = (this.from + this.to) / 2) {
    this.show(around - (around - this.from) * factor, around + (this.to - around) * factor);
  }

  move(share) { const by = share * (this.to - this.from); this.show(this.from + by, this.to + by); }

  zoomTo({ lane, index }) {
    const length = Math.max(lane.end[index] - lane.start[index], 1e-3);
    this.show(lane.start[index] - 2 * length, lane.end[index] + 2 * length);
  }

  // --- what is pointed at

  find(event) {
    const box = byId("chart").getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const row = x < GUTTER ? null : this.layout?.at(y);
    if (!row) return null;
    const n = Math.max(0, Math.min(row.lane.depth - 1, Math.floor((y - row.top) / (row.height + 1))));
    const index = row.lane.at(this.timeAt(x), (2 * (this.to - this.from)) / (this.width - GUTTER - RIGHT), n);
    return index < 0 ? null : { lane: row.lane, index };
  }

  describe({ lane, index }) {
    const meaning = lane.meaning[index], duration = lane.end[index] - lane.start[index];
    const names = this.model.views.map((view) => view.name);
    const where = [`rank ${lane.rank}`];
    if (meaning.segment >= 0) where.push(`segment ${meaning.segment}`);
    if (meaning.microbatch !== "") where.push(`micro-batch ${meaning.microbatch}`);
    const lines = [where.join(" · "), `${names[lane.view]}: ${spell(duration)}, starts at ${spell(lane.own.start[index], this.model.duration, 5)}`];
    const twin = this.model.counterpart(lane, index);
    if (twin) {
      const other = twin.lane.end[twin.index] - twin.lane.start[twin.index];
      const late = twin.lane.start[twin.index] - lane.start[index];
      const when = Math.abs(late) > ROUNDING ? `${spell(Math.abs(late))} ${late < 0 ? "earlier" : "later"}` : "at the same time";
      lines.push(`${names[twin.lane.view]}: ${spell(other)}, starts ${when}${this.model.aligned ? " in the iteration" : ""}`);
    }
    if (lane.path[index]) lines.push("on the critical path");
    const title = lane.words[index].match(/^\d/) ? `${lane.words[index]} – ${meaning.name}` : meaning.name;
    return { title, lines };
  }

  tell(found, x, y) {
    const tip = byId("tip");
    tip.hidden = !found;
    if (!found) return;
    const { title, lines } = this.describe(found);
    tip.replaceChildren(...[["b", title], ...lines.map((line) => ["p", line])].map(([tag, text]) => {
      const element = document.createElement(tag);
      element.textContent = text;
      return element;
    }));
    const [width, height] = [tip.offsetWidth, tip.offsetHeight];
    tip.style.left = `${Math.max(8, Math.min(x + 16, window.innerWidth - width - 8))}px`;
    tip.style.top = `${y + 20 + height > window.innerHeight ? Math.max(8, y - height - 14) : y + 20}px`;
  }

  select(found) {
    this.selected = found;
    if (found) {
      const { lane, index } = found;
      if (lane.end[index] < this.from || lane.start[index] > this.to) {
        const half = (this.to - this.from) / 2, middle = (lane.start[index] + lane.end[index]) / 2;
        this.show(middle - half, middle + half);
      }
      const row = this.layout.of(lane);
      this.scrollTo(row);
      const box = byId("chart").getBoundingClientRect();
      const x = GUTTER + ((lane.start[index] - this.from) / (this.to - this.from)) * (this.width - GUTTER - RIGHT);
      this.tell(found, box.left + Math.max(GUTTER, x), box.top + topOf(row, lane.row[index]) + row.height - 10);
      const { title, lines } = this.describe(found);
      byId("said").textContent = [title, ...lines].join(", ");
    } else {
      this.tell(null);
    }
    this.redraw();
  }

  /** Scroll the page to a row that is outside of the window, or below the axis, which stays. */
  scrollTo(row) {
    const top = byId("chart").getBoundingClientRect().top, above = byId("top").offsetHeight;
    const isSeen = top + row.top >= above && top + row.bottom <= window.innerHeight;
    if (!isSeen) window.scrollBy(0, top + (row.top + row.bottom) / 2 - (above + window.innerHeight) / 2);
  }

  /** Select the next action in time, or the one beside it in another lane. */
  step(along, across) {
    const rows = this.layout.rows.filter((row) => row.lane.length);
    if (!this.selected) {
      const lane = rows[0]?.lane;
      if (lane) this.select({ lane, index: Math.min(lane.length - 1, lane.firstAfter(this.from)) });
      return;
    }
    const { lane, index } = this.selected;
    if (along) {
      this.select({ lane, index: Math.max(0, Math.min(lane.length - 1, index + along)) });
      return;
    }
    const at = rows.findIndex((row) => row.lane === lane) + across;
    const other = rows[Math.max(0, Math.min(rows.length - 1, at))].lane;
    this.select({ lane: other, index: Math.min(other.length - 1, other.firstAfter(lane.start[index])) });
  }

  // --- a range of time, and what is looked for

  /** Select a range of the times that are drawn, or none; the table below says what is in it. */
  choose(range) {
    this.range = range;
    const panel = byId("range");
    panel.hidden = !range;
    if (range) this.tabulate(panel, ...range);
    this.redraw();
  }

  tabulate(panel, from, to) {
    const shown = this.model.views.filter((view) => view.shown);
    const columns = shown.map((view) => this.model.statistics(view, from, to));
    const names = [...new Set(columns.flatMap((column) => [...column.keys()]))];
    const of = (name) => columns.find((column) => column.has(name)).get(name);
    const most = (name) => Math.max(...columns.map((column) => column.get(name)?.time ?? 0));
    names.sort((a, b) => of(a).beside - of(b).beside || most(b) - most(a));
    const ranks = this.model.numRanks, length = to - from;
    const cell = (tag, text) => Object.assign(document.createElement(tag), { textContent: text });
    const row = (...cells) => { const line = document.createElement("tr"); line.append(...cells); return line; };
    const head = document.createElement("thead"), body = document.createElement("tbody");
    head.append(row(cell("th", "time of a rank, mean"), ...shown.flatMap(({ name }) => [cell("th", name), cell("th", "share"), cell("th", "actions")])));
    for (const name of names) {
      if (!most(name)) continue;
      const title = cell("th", of(name).beside ? `${name}, under way` : name);
      const swatch = document.createElement("i");
      const { kind, waited } = of(name).meaning, shades = this.model.palette[kind];
      swatch.style.cssText = waited ? `border:1.5px solid var(--waits-${waited})` : `background:${shades?.at(-1) ?? `var(--${kind})`}`;
      title.prepend(swatch);
      title.scope = "row";
      body.append(row(title, ...columns.flatMap((column) => {
        const found = column.get(name), time = found?.time ?? 0;
        return [cell("td", spell(time / ranks, length)), cell("td", `${((100 * time) / (ranks * length)).toFixed(1)}%`),
          cell("td", found ? found.count ?? "" : "–")];
      })));
    }
    const table = document.createElement("table");
    table.append(head, body);
    const [unit, unitName] = unitOf(this.model.duration);
    const digits = Math.max(0, 2 - Math.floor(Math.log10(length / unit)));
    byId("range-title").textContent = `${(from / unit).toFixed(digits)} – ${(to / unit).toFixed(digits)} ${unitName}: ${spell(length)}`;
    byId("range-table").replaceChildren(table);
  }

  look(text) {
    this.hits = this.model.search(text);
    this.painter.hits = null;
    if (text.trim()) {
      this.painter.hits = new Map();
      for (const { lane, index } of this.hits) {
        if (!this.painter.hits.has(lane)) this.painter.hits.set(lane, new Set());
        this.painter.hits.get(lane).add(index);
      }
    }
    this.hit = -1;
    this.select(null);
    this.nextHit(1);
    this.count();
  }

  /** Go on to the next of what was found, or back. */
  nextHit(by) {
    if (!this.hits.length) return;
    this.hit = this.hit < 0 ? (by > 0 ? 0 : this.hits.length - 1) : (this.hit + by + this.hits.length) % this.hits.length;
    this.select(this.hits[this.hit]);
    this.count();
  }

  count() {
    const total = this.hits.length, at = this.hit >= 0 ? `${this.hit + 1} of ` : "";
    byId("found").textContent = byId("search").value.trim() ? (total ? `${at}${total}` : "nothing") : "";
  }

  // --- events

  listen() {
    const chart = byId("chart");
    chart.addEventListener("wheel", (event) => {
      const box = chart.getBoundingClientRect();
      if (event.clientX - box.left < GUTTER) return; // beside the chart the wheel scrolls the page
      const sideways = event.shiftKey ? event.deltaY || event.deltaX : event.deltaX;
      const zooms = event.ctrlKey || event.metaKey, moves = event.shiftKey || Math.abs(sideways) > Math.abs(event.deltaY);
      if (!zooms && !moves) return; // the wheel alone scrolls the page
      event.preventDefault();
      if (zooms) this.zoom(Math.exp(Math.max(-240, Math.min(240, event.deltaY)) / 400), this.timeAt(event.clientX - box.left));
      else this.move(sideways / 1000);
    }, { passive: false });
    chart.addEventListener("pointerdown", (event) => {
      if (event.button > 0) return;
      if (event.shiftKey) this.beginRange(event, chart);
      else this.drag = { x: event.clientX, from: this.from, to: this.to, moved: false };
      chart.setPointerCapture?.(event.pointerId);
    });
    chart.addEventListener("pointermove", (event) => this.point(event));
    chart.addEventListener("pointerup", (event) => {
      if (this.drag && !this.drag.moved) this.select(this.find(event));
      this.drag = null;
      this.anchor = null;
      chart.classList.remove("moving");
    });
    chart.addEventListener("pointercancel", () => { this.drag = this.anchor = null; });
    chart.addEventListener("pointerleave", () => { this.hovered = this.pointed = null; if (!this.selected) this.tell(null); this.redraw(); });
    chart.addEventListener("dblclick", (event) => { const found = this.find(event); if (found) this.zoomTo(found); });
    document.addEventListener("keydown", (event) => { if (this.key(event)) event.preventDefault(); });
    chart.addEventListener("blur", () => this.select(null));
    this.listenToOverview();
    this.listenToAxis();
    const search = byId("search");
    search.addEventListener("input", () => this.look(search.value));
    search.addEventListener("keydown", (event) => {
      if (event.key === "Enter") this.nextHit(event.shiftKey ? -1 : 1);
      else if (event.key === "Escape") { search.value = ""; this.look(""); this.select(null); search.blur(); }
    });
    search.addEventListener("blur", () => this.select(null));
    byId("range-close").addEventListener("click", () => this.choose(null));
    byId("align")?.addEventListener("click", () => this.toggleAlign());
    byId("in").addEventListener("click", () => this.zoom(0.5));
    byId("out").addEventListener("click", () => this.zoom(2));
    byId("fit").addEventListener("click", () => this.fit());
    byId("path").addEventListener("click", () => this.togglePath());
    for (const button of document.querySelectorAll("[data-view]")) {
      button.addEventListener("click", () => this.toggleView(button));
    }
    new ResizeObserver(() => this.redraw()).observe(byId("diagram"));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { this.painter.readColors(); this.redraw(); });
  }

  /** Dragged on the time axis, or with Shift in the chart, the pointer selects a range. */
  beginRange(event, canvas) {
    this.anchor = this.timeAt(event.clientX - canvas.getBoundingClientRect().left);
    this.select(null);
    this.choose(null);
  }

  stretch(event, canvas) {
    const end = this.timeAt(event.clientX - canvas.getBoundingClientRect().left);
    const [from, to] = [this.anchor, end].map((time) => Math.max(0, Math.min(this.model.duration, time))).sort((a, b) => a - b);
    if (to > from) this.choose([from, to]);
  }

  listenToAxis() {
    const axis = byId("axis");
    axis.addEventListener("pointerdown", (event) => { if (event.button <= 0) { axis.setPointerCapture?.(event.pointerId); this.beginRange(event, axis); } });
    axis.addEventListener("pointermove", (event) => { if (this.anchor !== null) this.stretch(event, axis); });
    for (const end of ["pointerup", "pointercancel"]) axis.addEventListener(end, () => { this.anchor = null; });
  }

  point(event) {
    this.pointed = this.timeAt(event.clientX - byId("chart").getBoundingClientRect().left);
    if (this.anchor !== null) {
      this.stretch(event, byId("chart"));
      return;
    }
    if (this.drag) {
      const by = event.clientX - this.drag.x;
      if (Math.abs(by) > 3) {
        this.drag.moved = true;
        byId("chart").classList.add("moving");
      }
      const time = (by / (this.width - GUTTER - RIGHT)) * (this.drag.to - this.drag.from);
      if (this.drag.moved) this.show(this.drag.from - time, this.drag.to - time);
      return;
    }
    const found = this.find(event);
    if (found || !this.selected) this.tell(found ?? null, event.clientX, event.clientY);
    if (found?.lane !== this.hovered?.lane || found?.index !== this.hovered?.index) {
      this.hovered = found;
      this.redraw();
    }
  }

  listenToOverview() {
    const overview = byId("overview");
    const jump = (event) => {
      if (!(event.buttons & 1)) return;
      const box = overview.getBoundingClientRect();
      const time = ((event.clientX - box.left - GUTTER) / (this.width - GUTTER - RIGHT)) * this.model.duration;
      const half = (this.to - this.from) / 2;
      this.show(time - half, time + half);
    };
    overview.addEventListener("pointerdown", (event) => { overview.setPointerCapture?.(event.pointerId); jump(event); });
    overview.addEventListener("pointermove", jump);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.tagName === "INPUT") return false;
    const inChart = {
      ArrowLeft: () => (event.shiftKey ? this.move(-0.2) : this.step(-1, 0)),
      ArrowRight: () => (event.shiftKey ? this.move(0.2) : this.step(1, 0)),
      ArrowUp: () => this.step(0, -1),
      ArrowDown: () => this.step(0, 1),
      Home: () => this.fit(),
      Enter: () => this.selected && this.zoomTo(this.selected),
    };
    const anywhere = { // Perfetto's
      w: () => this.zoom(1 / 1.5, this.pointed ?? this.middle()), s: () => this.zoom(1.5, this.pointed ?? this.middle()),
      a: () => this.move(-0.2), d: () => this.move(0.2),
      f: () => this.selected && this.zoomTo(this.selected), m: () => this.selected && this.choose(this.timesOf(this.selected)),
      "/": () => byId("search").focus(),
      "+": () => this.zoom(0.5, this.middle()), "=": () => this.zoom(0.5, this.middle()),
      "-": () => this.zoom(2, this.middle()), "−": () => this.zoom(2, this.middle()),
      0: () => this.fit(), c: () => this.togglePath(),
      Escape: () => (this.selected ? this.select(null) : this.choose(null)),
    };
    const act = anywhere[event.key] ?? (event.target === byId("chart") ? inChart[event.key] : undefined);
    act?.();
    return act !== undefined;
  }

  timesOf({ lane, index }) { return [lane.start[index], lane.end[index]]; }

  middle() {
    const chosen = this.selected;
    return chosen ? (chosen.lane.start[chosen.index] + chosen.lane.end[chosen.index]) / 2 : undefined;
  }

  togglePath() {
    this.showPath = !this.showPath;
    byId("path").setAttribute("aria-pressed", this.showPath);
    this.redraw();
  }

  toggleAlign() {
    this.choose(null);
    this.model.align(!this.model.aligned);
    byId("align").setAttribute("aria-pressed", this.model.aligned);
    this.fit();
  }

  toggleView(button) {
    const view = this.model.views[+button.dataset.view];
    if (view.shown && this.model.views.filter((v) => v.shown).length === 1) return; // one stays
    view.shown = !view.shown;
    button.setAttribute("aria-pressed", view.shown);
    this.draw(); // a hit may be in a row that is new
    this.look(byId("search").value);
    this.choose(this.range);
  }
}

const view = new View(new Model(JSON.parse(byId("data").textContent)));
