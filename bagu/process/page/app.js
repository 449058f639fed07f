// The page of a process: what-if sliders, recommendation or refusal, the data's health, models, roles, upload, history.

import { el } from "/dom.js";
import { language, setLanguage, t } from "/words.js";

const $ = (id) => document.getElementById(id);
let state = null;
let row = {};
let upload = null; // {data, schema} of a file that was chosen
let recent = null; // {name, data} of a file with the latest rows of the process
let answer = null;
let asked = 0;

const show = (value) => (typeof value === "number" ? Number(value.toPrecision(4)).toString() : String(value));
const said = (words) => Object.entries(words).map(([name, value]) => `${name} ${show(value)}`).join(", ");

async function call(path, body) {
  const headers = { "Content-Type": "application/json" };
  const key = sessionStorage.getItem("key");
  if (key) headers.Authorization = `Bearer ${key}`;
  const response = await fetch(path, body === undefined ? { headers } : { method: "POST", headers, body: JSON.stringify(body) });
  const found = await response.json();
  if (response.status === 401) {
    const given = prompt("API key");
    if (given) {
      sessionStorage.setItem("key", given);
      return call(path, body);
    }
  }
  if (!response.ok) throw new Error(found.error.message);
  return found;
}

function fill(id, ...nodes) {
  $(id).replaceChildren(...nodes);
}

function drawSettings() {
  const rows = state.inputs.map((input) => {
    const label = el("label", { for: `in-${input.name}` }, input.name, " ", el("small", {}, input.unit, " ", t(input.role)));
    if (input.levels.length) {
      const options = input.levels.map((level) => el("option", { value: level, selected: level === row[input.name] }, level));
      const select = el("select", { id: `in-${input.name}`, on: { change: (e) => change(input.name, e.target.value) } }, options);
      return el("div", { class: "row" }, label, select, "");
    }
    const number = el("input", { type: "number", step: "any", "aria-label": input.name, value: show(row[input.name]) });
    const range = el("input", {
      type: "range", id: `in-${input.name}`, min: input.low, max: input.high,
      step: input.step ?? (input.high - input.low) / 200 ?? "any", value: row[input.name],
    });
    range.addEventListener("input", () => { number.value = show(Number(range.value)); change(input.name, Number(range.value)); });
    number.addEventListener("change", () => { range.value = number.value; change(input.name, Number(number.value)); });
    return el("div", { class: "row" }, label, range, number);
  });
  const now = el("input", { type: "checkbox", id: "from-now" });
  fill(
    "settings", el("h2", {}, t("settings")), ...rows, el("div", { id: "forecast" }),
    el("div", { class: "buttons" },
      el("button", { type: "button", class: "main", id: "ask", on: { click: ask } }, t("recommend")),
      el("label", {}, now, " ", t("from_now"))),
    el("p", { class: "soft" }, el("label", {}, t("recent"), " ",
      el("input", { type: "file", accept: ".csv,.parquet,text/csv", id: "recent", on: { change: readRecent } })),
      " ", el("span", { id: "recent-name" }, recent?.name ?? "")),
  );
}

function change(name, value) {
  row[name] = value;
  forecast();
}

async function forecast() {
  const turn = ++asked;
  try {
    const found = await call("/v1/process/whatif", { row });
    if (turn !== asked) return;
    const inside = found.distance <= 1;
    const facts = { d: show(found.distance), column: found.far_in };
    fill(
      "forecast", el("p", { class: "soft" }, t("forecast", { goal: state.goal })),
      el("p", { class: "figure" }, `${show(found.mean)} ${state.unit}`),
      el("p", {}, t("band", { low: show(found.low), high: show(found.high) })),
      ...Object.entries(found.limits).map(([text, p]) => el("p", {}, `${text}: ${(100 * p).toFixed(1)} %`)),
      el("p", { class: inside ? "good" : "alarm" }, t(inside ? "inside" : "outside", facts)),
    );
  } catch (error) {
    fill("forecast", el("p", { class: "alarm" }, t("failed", { why: error.message })));
  }
}

async function ask() {
  const of = (role) => Object.fromEntries(state.inputs.filter((i) => i.role === role).map((i) => [i.name, row[i.name]]));
  $("ask").disabled = true;
  fill("answer", el("h2", {}, t("answer")), el("p", { class: "soft" }, t("working")));
  try {
    answer = await call("/v1/process/recommend", { given: of("context"), now: $("from-now").checked ? of("setting") : {}, recent: recent?.data });
    state.answers.push({ given: of("context"), answer });
  } catch (error) {
    answer = { refused: "error", words: { en: error.message, zh: error.message } };
  }
  $("ask").disabled = false;
  drawAnswer();
  drawHistory();
}

function drawAnswer() {
  const parts = [el("h2", {}, t("answer"))];
  if (state.no_skill && !answer) parts.push(el("p", { class: "alarm" }, state.no_skill[language()]));
  else if (!answer) parts.push(el("p", { class: "soft" }, t("no_answer")));
  else if (answer.refused) parts.push(el("p", { class: "alarm" }, answer.words[language()]));
  else parts.push(...answer.choices.map(drawChoice), ...drawRest());
  fill("answer", ...parts);
}

function drawChoice(choice) {
  const f = choice.forecast;
  const side = t(state.better > 0 ? "least" : "most");
  const use = () => { Object.assign(row, answer.context, choice.settings); drawSettings(); forecast(); };
  const names = Object.keys(choice.nearest[0] ?? {});
  return el("div", { class: "choice" },
    el("p", { class: "figure" }, said(choice.settings)),
    el("p", {}, t("promise", { mean: show(f.mean), unit: state.unit, side, bound: show(f.promise) })),
    el("p", { class: "soft" }, t("band", { low: show(f.low), high: show(f.high) })),
    ...Object.entries(f.limits).map(([text, p]) => el("p", { class: "soft" }, `${text}: ${(100 * p).toFixed(1)} %`)),
    el("details", {}, el("summary", {}, t("nearest")),
      el("div", { class: "scroll" }, grid(names, choice.nearest.map((r) => names.map((n) => show(r[n])))))),
    el("button", { type: "button", on: { click: use } }, t("settings")));
}

function drawRest() {
  const parts = [el("p", { class: "soft" }, t("best", { row: said(answer.best_run) }))];
  if (answer.experiment) parts.push(el("p", {}, t("experiment", { row: said(answer.experiment[0]) })));
  return [...parts, el("p", { class: "soft" }, t("association"))];
}

function grid(heads, rows) {
  const line = (tag, cells) => el("tr", {}, cells.map((c) => el(tag, {}, c)));
  return el("table", {}, el("thead", {}, line("th", heads)), el("tbody", {}, rows.map((r) => line("td", r))));
}

function drawHealth(findings) {
  const words = findings.map((f) => el("p", { class: f.level === "error" ? "alarm" : "" }, f[language()]));
  fill("health", el("h2", {}, t("health")), ...(words.length ? words : [el("p", { class: "good" }, t("healthy"))]));
}

function drawModels() {
  const parts = Object.entries(state.fits).flatMap(([target, fit]) => {
    const heads = [t("model"), t("weight"), ...fit.scores.mean.map((s) => t(`split_${s.split}`))];
    const rows = Object.entries(fit.scores).map(([m, s]) => [m, fit.weights[m]?.toFixed(2) ?? "", ...s.map((x) => x.r2.toFixed(3))]);
    return [el("p", {}, target), el("div", { class: "scroll" }, grid(heads, rows)), ...fit.notes[language()].map((n) => el("p", { class: "soft" }, n))];
  });
  fill("models", el("h2", {}, t("models")), ...parts, el("a", { href: `/v1/process/report?lang=${language()}` }, t("report")));
}

function drawRoles() {
  const schema = upload ? upload.schema : state.schema;
  const choose = (column, name, options) => el("select", { "aria-label": `${column.name} ${name}`, on: { change: (e) => { column[name] = e.target.value; } } },
    options.map((o) => el("option", { value: o, selected: o === column[name] }, o)));
  const number = (column, name) => el("input", { type: "number", step: "any", "aria-label": `${column.name} ${name}`, value: column[name] ?? "",
    on: { change: (e) => { column[name] = e.target.value === "" ? null : Number(e.target.value); } } });
  const rows = schema.columns.slice(0, 100).map((c) => [
    c.name, choose(c, "role", ["setting", "context", "target", "group", "time", "id", "ignore"]),
    choose(c, "goal", ["none", "max", "min"]), number(c, "low"), number(c, "high"), number(c, "step"),
  ]);
  const limits = el("input", { type: "text", class: "limits", "aria-label": t("limits"), value: schema.limits.join("; "),
    on: { change: (e) => { schema.limits = e.target.value.split(";").map((x) => x.trim()).filter(Boolean); } } });
  const file = el("input", { type: "file", accept: ".csv,.parquet,text/csv", "aria-label": t("upload"), on: { change: read } });
  const fit = el("button", { type: "button", class: "main", on: { click: fitUpload } }, t("fit"));
  fill("roles", el("h2", {}, t("roles")), el("p", {}, t("upload"), " ", file), el("p", { id: "roles-state", class: "soft" }),
    el("div", { class: "scroll" }, grid([t("column"), t("role"), t("goal"), t("low"), t("high"), t("step")], rows)),
    el("p", {}, limits, " ", el("small", {}, t("limits"))), el("div", { class: "buttons" }, fit));
}

async function base64(file) {
  const bytes = new Uint8Array(await file.arrayBuffer());
  let text = "";
  for (let i = 0; i < bytes.length; i += 32768) text += String.fromCharCode(...bytes.subarray(i, i + 32768));
  return btoa(text);
}

async function readRecent(event) {
  const file = event.target.files[0];
  recent = file ? { name: file.name, data: await base64(file) } : null;
  $("recent-name").textContent = recent?.name ?? "";
}

async function read(event) {
  const file = event.target.files[0];
  if (!file) return;
  $("roles-state").textContent = t("reading", { name: file.name });
  try {
    const data = await base64(file);
    const found = await call("/v1/process/look", { data });
    upload = { data, schema: found.schema };
    drawRoles();
    drawHealth(found.findings);
  } catch (error) {
    $("roles-state").textContent = error.message;
  }
}

async function fitUpload() {
  $("roles-state").textContent = t("fitting");
  try {
    begin(await call("/v1/process/fit", upload ?? { schema: state.schema }));
  } catch (error) {
    $("roles-state").textContent = error.message;
  }
}

function drawHistory() {
  const rows = state.answers.slice().reverse().map(({ given, answer: a }) => [
    typeof given === "object" && !Array.isArray(given) ? said(given) : String(given),
    a.refused ? a.words[language()] : `${said(a.choices[0].settings)} → ${show(a.choices[0].forecast.mean)} ${state.unit}`,
  ]);
  fill("history", el("h2", {}, t("history")), rows.length ? el("div", { class: "scroll" }, grid([t("context"), t("answer")], rows)) : el("p", { class: "soft" }, t("none_yet")));
}

function draw() {
  $("title").textContent = state.run;
  $("about").textContent = t("about", { rows: state.rows, goal: state.goal });
  $("language").textContent = t("other");
  drawSettings();
  forecast();
  drawAnswer();
  drawHealth(state.findings);
  drawModels();
  drawRoles();
  drawHistory();
}

function begin(found) {
  state = found;
  row = { ...state.last };
  upload = recent = answer = null;
  draw();
}

$("language").addEventListener("click", () => {
  setLanguage(language() === "zh" ? "en" : "zh");
  localStorage.setItem("language", language());
  draw();
});
setLanguage(localStorage.getItem("language") ?? (navigator.language.startsWith("zh") ? "zh" : "en"));
call("/v1/process").then(begin, (error) => fill("answer", el("p", { class: "alarm" }, error.message)));
