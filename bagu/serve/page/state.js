// The state of the page. A conversation may stream an answer while another one is shown, so answers belong to
// conversations; the engine batches several answers.

import { openId } from "./place.js";
import { loadChats, loadSettings, newChat } from "./store.js";

const chats = loadChats();

export const state = {
  chats,
  chat: chats.find(({ id }) => id === openId()) ?? newChat(),
  query: "", // what the list of conversations is searched for
  renaming: null, // the conversation whose title is being edited
  models: [], // of /v1/models; empty until the server answers
  stores: [], // of /v1/vector_stores
  settings: loadSettings(),
  running: new Map(), // id of a conversation: the AbortController of its answers
};

export const isRunning = (chat = state.chat) => state.running.has(chat.id);
