// Saves a conversation, and says so if the browser's storage is full.

import { refreshChats } from "./render.js";
import { state } from "./state.js";
import { deleteChat, saveChat, StorageFull } from "./store.js";
import { toast } from "./toast.js";
import { t } from "./words.js";

/** Saves `chat` if it is in the list: it may have been deleted while its answer streamed. Nothing is deleted to make
 * room unless the user asks for it. */
export function keep(chat) {
  if (!state.chats.includes(chat)) return;
  chat.updated = Date.now();
  try {
    saveChat(chat);
  } catch (error) {
    if (!(error instanceof StorageFull)) throw error;
    const others = state.chats.filter((one) => one !== chat);
    const oldest = others.reduce((a, b) => (a && a.updated <= b.updated ? a : b), null);
    const press = () => {
      state.chats = state.chats.filter((one) => one !== oldest);
      deleteChat(oldest);
      refreshChats();
      keep(chat);
    };
    toast(t("storage_full"), oldest && { name: t("delete_oldest", { title: oldest.title || t("untitled") }), press });
  }
}
