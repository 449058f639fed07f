// The settings panel: the system prompt, the schema and the tools of the conversation, sampling, and the API key.

import { showStores, startDocuments } from "./documents.js";
import { EXAMPLE_SCHEMA, EXAMPLE_TOOLS, parsedSchema, parsedTools } from "./formats.js";
import { keep } from "./keep.js";
import { currentModel, findModels } from "./models.js";
import { showControls, UNSET } from "./settings.js";
import { state } from "./state.js";
import * as store from "./store.js";
import { t } from "./words.js";

const $ = (id) => document.getElementById(id);
const BOXES = { system: null, schema: parsedSchema, tools: parsedTools };
const EXAMPLES = { schema: EXAMPLE_SCHEMA, tools: EXAMPLE_TOOLS };

/** Shows the settings of the conversation. */
export function showOptions() {
  showStores();
  for (const [name, parsed] of Object.entries(BOXES)) {
    if ($(name).value !== state.chat[name]) $(name).value = state.chat[name];
    if (parsed) showState(name, parsed(state.chat[name]));
  }
}

function showState(name, { value, error }) {
  const note = $(`${name}-state`);
  note.textContent = error ?? (value ? t(`${name}_on`) : t(`${name}_hint`));
  note.className = error ? "bad" : value ? "good" : "";
  $(name).setAttribute("aria-invalid", Boolean(error));
}

export function showSampling() {
  showControls($("sampling"), state.settings, currentModel()?.default_sampling ?? {}, setSettings);
}

function setSettings(next) {
  Object.assign(state.settings, next);
  store.saveSettings(state.settings);
}

function setText(name, text) {
  state.chat[name] = text;
  keep(state.chat);
  showOptions();
}

export function startOptions() {
  startDocuments();
  for (const name of Object.keys(BOXES)) $(name).addEventListener("input", () => setText(name, $(name).value));
  for (const [name, example] of Object.entries(EXAMPLES)) {
    $(`${name}-example`).addEventListener("click", () => setText(name, JSON.stringify(example, null, 2)));
  }
  $("reset").addEventListener("click", () => (setSettings(UNSET), showSampling()));
  $("key").value = store.loadKey();
  $("key").addEventListener("change", () => (store.saveKey($("key").value.trim()), findModels()));
}
