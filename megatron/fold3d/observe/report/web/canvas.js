"use strict";
// What every picture on a canvas needs.

/** A canvas in CSS pixels, sharp on every screen. */
class Surface {
  constructor(canvas) { this.canvas = canvas; this.context = canvas.getContext("2d"); }

  resize(width, height) {
    const ratio = window.devicePixelRatio || 1;
    this.canvas.style.height = `${height}px`;
    const pixels = [Math.round(width * ratio), Math.round(height * ratio)];
    if (this.canvas.width !== pixels[0] || this.canvas.height !== pixels[1]) [this.canvas.width, this.canvas.height] = pixels;
    Object.assign(this, { width, height });
    this.context.setTransform(ratio, 0, 0, ratio, 0, 0);
    this.context.clearRect(0, 0, width, height);
    return this.context;
  }
}

/** The text color that reads on a fill. */
function textOn(fill) {
  const [r, g, b] = [1, 3, 5].map((i) => (parseInt(fill.slice(i, i + 2), 16) / 255) ** 2.2);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.26 ? "#14202f" : "#fff";
}

/** Round times, some 110 pixels apart. */
function ticks(view, pixels) {
  const rough = (view.to - view.from) / Math.max(1, pixels / 110);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((k) => k * power).find((s) => s >= rough);
  const found = [];
  for (let i = Math.ceil(view.from / step - 1e-9); i * step <= view.to + 1e-9 * step; i++) found.push(i * step);
  return found;
}
