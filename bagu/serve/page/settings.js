// The sampling controls, generated from one table; `request` turns them into fields of the API.

import { el } from "./dom.js";
import { t } from "./words.js";

// API field, range, and the label of an empty field without a server default; fields without a label have a slider.
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

export const UNSET = Object.fromEntries(CONTROLS.map(({ name }) => [name, null]));

/** Fills `root` with the controls; calls `changed(settings)` at every valid change. A field that is not set is empty
 * and shows the server's default as its placeholder and slider position. */
export function showControls(root, settings, defaults, changed) {
  root.replaceChildren(
    ...CONTROLS.map(({ name, min, max, step, empty, hint }) => {
      const range = { min: String(min), max: String(max), step: String(step) };
      const usual = String(defaults[name] ?? "");
      const value = String(settings[name] ?? "");
      const own = { placeholder: usual || (empty ? t(empty) : ""), step: empty ? "1" : "any", value };
      const field = el("input", { type: "number", id: name, ...range, ...own });
      const sliding = { type: "range", tabindex: "-1", "aria-label": t(name), ...range, value: value || usual };
      const slider = empty ? null : el("input", sliding);
      const take = () => {
        if (field.checkValidity()) changed({ [name]: field.value === "" ? null : Number(field.value) });
      };
      field.addEventListener("input", () => {
        if (slider) slider.value = field.value || usual;
        take();
      });
      slider?.addEventListener("input", () => {
        field.value = slider.value;
        take();
      });
      return el("label", { class: "field" }, el("span", {}, t(name)), field, slider, hint && el("small", {}, t(hint)));
    }),
  );
}

/** The fields that the user has set; the server applies its defaults to the others. */
export function request(settings) {
  return Object.fromEntries(Object.entries(settings).filter(([name, value]) => name in UNSET && value !== null));
}
