// A conversation is a tree of messages: editing a message or asking again adds a branch beside the old one.
//
// `chat.messages` has all messages in the order of their creation, each with its `id` and the id of its `parent` (null
// for a first message). `chat.leaf` is the id of the last message shown, so the shown messages are those from the root
// to the leaf. Two answers that the user has not chosen between have the same `pair`.

export function newId() {
  return `${Date.now().toString(36)}${Math.random().toString(36).slice(2, 8)}`;
}

/** Adds `message` after `parent` (null: as a first message) and shows it; returns it. */
export function append(chat, parent, message) {
  Object.assign(message, { id: newId(), parent: parent?.id ?? null });
  chat.messages.push(message);
  chat.leaf = message.id;
  return message;
}

/** The messages from the first one to `message`. */
export function pathTo(chat, message) {
  const byId = new Map(chat.messages.map((one) => [one.id, one]));
  const path = [];
  for (let at = message; at; at = byId.get(at.parent)) path.unshift(at);
  return path;
}

/** The messages that are shown. */
export const shown = (chat) => pathTo(chat, byId(chat, chat.leaf));

export const byId = (chat, id) => chat.messages.find((one) => one.id === id) ?? null;

/** The branches at `message`, itself included, oldest first. */
export const branches = (chat, message) => chat.messages.filter(({ parent }) => parent === message.parent);

/** Shows the branch of `message`, to its newest end. */
export function showBranch(chat, message) {
  let leaf = message;
  for (let next = message; next; next = chat.messages.findLast(({ parent }) => parent === leaf.id)) leaf = next;
  chat.leaf = leaf.id;
}

/** Removes a message without answers, and shows its parent. */
export function remove(chat, message) {
  chat.messages = chat.messages.filter((one) => one !== message);
  chat.leaf = message.parent;
}

/** The two answers that the user has not chosen between, if they are at the end of what is shown; otherwise []. */
export function openPair(chat) {
  const pair = byId(chat, chat.leaf)?.pair;
  return pair ? chat.messages.filter((one) => one.pair === pair) : [];
}

/** Continues with `message`; the other answer of its pair stays as a branch. */
export function choose(chat, message) {
  for (const one of openPair(chat)) delete one.pair;
  chat.leaf = message.id;
}

/** Gives ids to the messages of a conversation that was stored as a list, each message after the one before it. */
export function withIds(chat) {
  if (chat.messages.every(({ id }) => id)) return chat;
  const messages = chat.messages.map((one, at) => ({ ...one, id: `m${at}`, parent: at ? `m${at - 1}` : null }));
  return { ...chat, messages, leaf: messages.at(-1)?.id ?? null };
}
