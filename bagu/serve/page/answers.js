// Requests answers and streams them into the conversation.

import { newAnswer, receive } from "./answer.js";
import * as client from "./client.js";
import { announce, atBottom, bottom, refresh, refreshChats, updateMessage } from "./render.js";
import { requestBody } from "./request.js";
import { look, openPanel } from "./shell.js";
import { state } from "./state.js";
import { loadKey } from "./store.js";
import { keep } from "./keep.js";
import { append, newId, pathTo } from "./tree.js";
import { t } from "./words.js";

/** Requests an answer after `parent` from each of `models`; two answers are shown side by side until one is chosen. */
export async function answer(chat, parent, models) {
  const controller = new AbortController();
  const path = pathTo(chat, parent);
  const pair = models.length > 1 ? { pair: newId() } : {};
  const answers = models.map((model) => append(chat, parent, { ...newAnswer(model), ...pair, _streaming: true }));
  chat.leaf = answers[0].id;
  state.running.set(chat.id, controller);
  refresh();
  bottom();
  await Promise.all(answers.map((message) => stream(chat, path, message, controller.signal)));
  state.running.delete(chat.id);
  keep(chat);
  if (chat === state.chat) (refresh(), announce(answers));
  else refreshChats();
}

async function stream(chat, path, message, signal) {
  const body = requestBody(chat, path, { ...state, ...look, model: message.model });
  if (body.response_format) message.json = true;
  try {
    await receive(message, client.chat(body, { key: loadKey(), signal }), () => grown(chat, message));
  } catch (error) {
    if (signal.aborted) message.finish = "abort";
    else message.error = error instanceof client.ApiError ? error.message : t("unreachable");
    if (error.status === 401) openPanel("settings");
  } finally {
    message._streaming = false;
    if (chat === state.chat) updateMessage(message);
  }
}

function grown(chat, message) {
  if (chat !== state.chat || !message._streaming) return;
  const stick = atBottom();
  updateMessage(message);
  if (stick) bottom();
}

export const stop = () => state.running.get(state.chat.id)?.abort();
