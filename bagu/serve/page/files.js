// The export dialog, and importing a file.

import { addChats } from "./actions.js";
import { download } from "./dom.js";
import { state } from "./state.js";
import { toast } from "./toast.js";
import { fileName, fromJson, toJson, toMarkdown } from "./transfer.js";
import { t } from "./words.js";

const $ = (id) => document.getElementById(id);

const EXPORTS = {
  markdown: (chat) => download(fileName(chat, "md"), toMarkdown(chat), "text/markdown"),
  json: (chat) => download(fileName(chat, "json"), toJson([chat]), "application/json"),
  all: () => download("bagu-chats.json", toJson(state.chats), "application/json"),
};

async function importFile(file) {
  try {
    const chats = fromJson(await file.text());
    addChats(chats);
    toast(t("imported", { n: chats.length }));
  } catch (error) {
    toast(t("import_failed", { name: file.name, why: error.message }));
  }
}

export function startTransfer() {
  const dialog = $("export");
  for (const button of dialog.querySelectorAll("[data-export]")) {
    button.addEventListener("click", () => (EXPORTS[button.dataset.export](dialog._chat), dialog.close()));
  }
  $("import").addEventListener("click", () => $("file").click());
  $("file").addEventListener("change", () => {
    if ($("file").files[0]) importFile($("file").files[0]);
    $("file").value = ""; // so that the same file can be chosen again
  });
}
