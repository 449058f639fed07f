// Where the reader is. The address names the open conversation, so a reload and the back button return to it. How far
// it is scrolled is kept for this tab: as a message and a distance, since heights change with the width of the window
// and with what is folded.

const HASH = "#chat=";
const KEY = "bagu.place";

/** The id of the conversation in the address, or null. */
export function openId() {
  return location.hash.startsWith(HASH) ? location.hash.slice(HASH.length) : null;
}

/** Puts a conversation into the address, or none for null. `replace` makes no step for the back button. */
export function setOpen(id, { replace = false } = {}) {
  if (id === openId()) return;
  const url = id === null ? location.pathname + location.search : HASH + id;
  history[replace ? "replaceState" : "pushState"](null, "", url);
}

/** Remembers which message is at the top edge of `scroll`, for the conversation `id`. */
export function savePlace(id, scroll, messages) {
  const edge = scroll.getBoundingClientRect().top;
  const boxes = [...messages.children].map((child) => child.getBoundingClientRect());
  const at = boxes.findIndex(({ bottom }) => bottom > edge);
  const end = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 2;
  sessionStorage.setItem(KEY, JSON.stringify({ id, at, into: at < 0 ? 0 : edge - boxes[at].top, end }));
}

/** Scrolls to where `savePlace` was called; to the end for another conversation. */
export function restorePlace(id, scroll, messages) {
  const place = JSON.parse(sessionStorage.getItem(KEY) ?? "{}");
  const message = place.id === id && !place.end ? messages.children[place.at] : undefined;
  if (!message) scroll.scrollTop = scroll.scrollHeight;
  else scroll.scrollTop += message.getBoundingClientRect().top - scroll.getBoundingClientRect().top + place.into;
}
