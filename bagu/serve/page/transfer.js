// Conversations as files: exported as Markdown or JSON, imported from JSON.
//
// An imported file is untrusted: only the fields below are taken, and each is checked.

import { newChat, LIMIT } from "./store.js";
import { shown, withIds } from "./tree.js";
import { spoken } from "./think.js";
import { t } from "./words.js";

const ROLES = ["user", "assistant", "tool"];
const NAMES = { user: "you", assistant: "assistant", tool: "tool_result" };

export function fileName(chat, extension) {
  return `${(chat.title || "chat").replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40)}.${extension}`;
}

/** The shown messages as Markdown. */
export function toMarkdown(chat) {
  const system = chat.system.trim() ? [`> ${chat.system.trim().replaceAll("\n", "\n> ")}`] : [];
  const messages = shown(chat).map((message) => {
    const calls = (message.tool_calls ?? []).map(({ function: { name, arguments: given } }) =>
      fenced(`${name}(${given})`),
    );
    const text = message.role === "assistant" ? spoken(message.content) : message.content;
    const name = message.model ? `${t("assistant")} (${message.model})` : t(NAMES[message.role]);
    return [`## ${name}`, text, ...calls].filter(Boolean).join("\n\n");
  });
  return `${[`# ${chat.title || t("untitled")}`, ...system, ...messages].join("\n\n")}\n`;
}

const fenced = (text) => `\`\`\`\n${text}\n\`\`\``;

/** All branches of the conversations, as JSON that `fromJson` reads. */
export function toJson(chats) {
  const plain = chats.map(({ title, system, schema, tools, created, leaf, messages }) => ({
    title, system, schema, tools, created: new Date(created).toISOString(), leaf, messages: messages.map(plainMessage),
  }));
  return `${JSON.stringify({ format: "bagu.chats", version: 1, chats: plain }, null, 2)}\n`;
}

const FIELDS = ["id", "parent", "role", "content", "reasoning", "model", "tool_calls", "tool_call_id", "name", "json", "images"];

function plainMessage(message) {
  return Object.fromEntries(FIELDS.filter((name) => message[name] !== undefined).map((name) => [name, message[name]]));
}

class Invalid extends Error {}

function check(condition, what) {
  if (!condition) throw new Invalid(what);
}

const isText = (value) => typeof value === "string";
const isImage = (value) => isText(value) && /^data:image\/(png|jpeg|webp|gif);base64,[A-Za-z0-9+/=]+$/.test(value);
const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

/** The conversations of a file: of `toJson`, or one with `messages` of roles and contents, as the API takes them.
 * Throws an Error that says what is wrong. */
export function fromJson(text) {
  check(text.length <= LIMIT, t("import_large", { n: LIMIT.toLocaleString("en") }));
  let file;
  try {
    file = JSON.parse(text);
  } catch (error) {
    throw new Invalid(t("not_json", { why: error.message }));
  }
  const chats = file?.format === "bagu.chats" ? file.chats : [file];
  check(Array.isArray(chats) && chats.every((chat) => Array.isArray(chat?.messages)), t("import_shape"));
  return chats.map(readChat);
}

function readChat(given) {
  const chat = newChat();
  for (const name of ["title", "system", "schema", "tools"]) {
    check(given[name] === undefined || isText(given[name]), t("import_field", { name }));
    chat[name] = given[name] ?? "";
  }
  const created = Date.parse(given.created);
  if (Number.isFinite(created)) chat.created = created;
  const system = given.messages.filter((message) => message?.role === "system");
  const messages = given.messages.filter((message) => message?.role !== "system").map(readMessage);
  check(system.every(({ content }) => isText(content)), t("import_field", { name: "system" }));
  chat.system ||= system.map(({ content }) => content).join("\n\n");
  const read = withIds({ ...chat, messages });
  checkTree(read.messages);
  read.leaf = read.messages.some(({ id }) => id === given.leaf) ? given.leaf : (read.messages.at(-1)?.id ?? null);
  return read;
}

function readMessage(given, at) {
  const place = (name) => t("import_message", { n: at + 1, name });
  check(isObject(given) && ROLES.includes(given.role), place("role"));
  check(isText(given.content) || (given.content === null && given.tool_calls), place("content"));
  const message = { role: given.role, content: given.content ?? "" };
  for (const name of ["id", "parent", "reasoning", "model", "tool_call_id", "name"]) {
    if (given[name] === undefined || given[name] === null) continue;
    check(isText(given[name]), place(name));
    message[name] = given[name];
  }
  if (message.id) message.parent ??= null;
  if (given.json === true) message.json = true;
  if (given.images) {
    check(Array.isArray(given.images) && given.images.every(isImage), place("images"));
    message.images = given.images;
  }
  if (given.tool_calls) message.tool_calls = readCalls(given.tool_calls, place("tool_calls"));
  return message;
}

function readCalls(given, wrong) {
  check(Array.isArray(given), wrong);
  return given.map((call) => {
    check(isText(call?.id) && isText(call.function?.name) && isText(call.function.arguments), wrong);
    return { id: call.id, type: "function", function: { name: call.function.name, arguments: call.function.arguments } };
  });
}

/** Every parent comes before its children, so there is no cycle, and no id occurs twice. */
function checkTree(messages) {
  const seen = new Set();
  for (const [at, { id, parent }] of messages.entries()) {
    check(!seen.has(id), t("import_message", { n: at + 1, name: "id" }));
    check(parent === null || seen.has(parent), t("import_message", { n: at + 1, name: "parent" }));
    seen.add(id);
  }
}
