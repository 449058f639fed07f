// The body of a chat completion request.

import { parsedSchema, parsedTools } from "./formats.js";
import { chosenStore } from "./documents.js";
import { request as sampling } from "./settings.js";

const TOP = 5; // alternatives per token

/** The request for an answer of `model` after the messages `path`. */
export function requestBody(chat, path, { model, settings, probabilities }) {
  const system = chat.system.trim() ? [{ role: "system", content: chat.system.trim() }] : [];
  const messages = path.filter(({ error, content, tool_calls: calls }) => !error && (content || calls)).map(apiMessage);
  const body = { model, messages: [...system, ...messages], ...sampling(settings) };
  const schema = parsedSchema(chat.schema).value;
  const tools = parsedTools(chat.tools).value;
  if (schema) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  if (tools) body.tools = tools;
  const store = chosenStore(chat);
  const asked = path.at(-1);
  if (store && asked?.role === "user" && !asked.images) body.file_search = { vector_store_ids: [store] };
  if (probabilities) Object.assign(body, { logprobs: true, top_logprobs: TOP });
  return body;
}

/** An answer goes back with its sources, so that the server writes its question as it was sent. */
function apiMessage({ role, content, tool_calls: calls, tool_call_id: answers, sources, images }) {
  if (sources?.length) return { role, content, ...(calls ? { tool_calls: calls } : {}), sources };
  if (answers) return { role, tool_call_id: answers, content };
  if (images?.length) return { role, content: [...images.map(imagePart), { type: "text", text: content }] };
  return calls ? { role, content: content || null, tool_calls: calls } : { role, content };
}

const imagePart = (url) => ({ type: "image_url", image_url: { url } });
