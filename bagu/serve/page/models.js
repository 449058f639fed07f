// The models of the server: which one answers, and which two if answers are compared side by side.

import * as client from "./client.js";
import { findStores } from "./documents.js";
import { el } from "./dom.js";
import { refresh } from "./render.js";
import { change, look } from "./shell.js";
import { state } from "./state.js";
import { loadKey } from "./store.js";
import { t } from "./words.js";

const $ = (id) => document.getElementById(id);
const EVERY_MS = 2000; // until the server answers
let changed = () => {};

/** `modelChanged` is called when another model is chosen, and when the server has answered. */
export function startModels(modelChanged) {
  changed = modelChanged;
  const choose = (name, id) => $(id).addEventListener("change", () => (change({ [name]: $(id).value }), changed()));
  choose("model", "model");
  choose("second", "second-model");
  $("compare").addEventListener("click", () => (change({ compare: !look.compare }), showPickers()));
  findModels();
}

const known = (id) => state.models.find((model) => model.id === id);

export const currentModel = () => known(look.model) ?? state.models[0];

/** The names of the models that answer the next message: one, or two that are compared. */
export function chosenModels() {
  const first = currentModel().id;
  return look.compare ? [first, secondModel()] : [first];
}

/** The second model of a comparison: the user's choice, or the first other one of the server. */
function secondModel() {
  const first = currentModel()?.id;
  return known(look.second)?.id ?? state.models.find(({ id }) => id !== first)?.id ?? first;
}

function showPickers() {
  const ids = state.models.map(({ id }) => id);
  for (const [id, value] of [["model", currentModel()?.id], ["second-model", secondModel()]]) {
    $(id).replaceChildren(...ids.map((name) => new Option(name, name)));
    if (value) $(id).value = value;
  }
  $("model").hidden = ids.length < 2 && !look.compare;
  $("second-model").hidden = $("versus").hidden = !look.compare;
  $("model-name").textContent = $("model").hidden ? (ids[0] ?? "") : "";
  $("compare").setAttribute("aria-pressed", look.compare);
}

/** The prompts that the model's files suggest replace the page's own examples. */
function showSuggestions() {
  const prompts = currentModel()?.suggested_prompts ?? [];
  if (prompts.length) $("examples").replaceChildren(...prompts.map((text) => el("button", { type: "button" }, text)));
}

export async function findModels() {
  const banner = $("banner");
  try {
    state.models = await client.models(loadKey());
    banner.hidden = true;
    await findStores();
    showPickers();
    showSuggestions();
    changed();
    refresh();
  } catch (error) {
    banner.textContent = error.status === 401 ? t("need_key") : t("server_gone");
    banner.hidden = false;
    if (error.status !== 401) setTimeout(findModels, EVERY_MS);
  }
}
