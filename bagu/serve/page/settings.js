// The sampling controls, made from one table; `request` turns them into fields of the API.

import { el } from "./dom.js";
import { DEFAULTS } from "./store.js";
import { t } from "./words.js";

// Field of the API, its range, and what an empty field means; those without one have a slider.
const CONTROLS = [
  { name: "temperature", min: 0, max: 2, step: 0.05, hint: "temperature_hint" },
  { name: "top_p", min: 0.01, max: 1, step: 0.01 },
  { name: "min_p", min: 0, max: 1, step: 0.01 },
  { name: "top_k", min: 1, max: 1000000, step: 1, empty: "off" },
  { name: "max_tokens", min: 1, max: 1000000, step: 1, empty: "auto" },
  { name: "seed", min: 0, max: Number.MAX_SAFE_INTEGER, step: 1, empty: "random" },
  { name: "repetition_penalty", min: 0.5, max: 2, step: 0.05 },
  { name: "presence_penalty", min: -2, max: 2, step: 0.1 },
  { name: "frequency_penalty", min: -2, max: 2, step: 0.1 },
];

/** Fills `root` with the controls; `changed(settings)` is called with every valid change. */
export function showControls(root, settings, changed) {
  root.replaceChildren(
    ...CONTROLS.map(({ name, min, max, step, empty, hint }) => {
      const range = { min: String(min), max: String(max), step: String(step), value: String(settings[name] ?? "") };
      const label = { "aria-label": t(name) };
      const own = { placeholder: empty && t(empty), step: empty ? "1" : "any", required: !empty };
      const field = el("input", { type: "number", id: name, ...range, ...own });
      const slider = empty ? null : el("input", { type: "range", tabindex: "-1", ...label, ...range });
      const take = (from, to) => {
        if (to) to.value = from.value;
        if (field.checkValidity()) changed({ ...settings, [name]: field.value === "" ? null : Number(field.value) });
      };
      field.addEventListener("input", () => take(field, slider));
      slider?.addEventListener("input", () => take(slider, field));
      return el("label", { class: "field" }, el("span", {}, t(name)), field, slider, hint && el("small", {}, t(hint)));
    }),
  );
}

/** What differs from doing nothing; temperature always, since servers disagree about its default. */
export function request(settings) {
  const set = ([name, value]) => value !== null && (name === "temperature" || value !== DEFAULTS[name]);
  return Object.fromEntries(Object.entries(settings).filter(([name]) => name in DEFAULTS).filter(set));
}
