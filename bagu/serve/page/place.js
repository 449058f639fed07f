// The reading position. The URL contains the open conversation, so a reload and the back button return to it. The
// scroll position is kept per tab, as a message and an offset, since heights change with the window's width and folded parts.

const HASH = "#chat=";
const KEY = "bagu.place";

/** The id of the conversation in the URL, or null. */
export function openId() {
  return location.hash.startsWith(HASH) ? location.hash.slice(HASH.length) : null;
}

/** Sets the conversation in the URL; null removes it. `replace` adds no entry to the browser history. */
export function setOpen(id, { replace = false } = {}) {
  if (id === openId()) return;
  const url = id === null ? location.pathname + location.search : HASH + id;
  history[replace ? "replaceState" : "pushState"](null, "", url);
}

/** Stores which message is at the top of `scroll`, for the conversation `id`. */
export function savePlace(id, scroll, messages) {
  const edge = scroll.getBoundingClientRect().top;
  const boxes = [...messages.children].map((child) => child.getBoundingClientRect());
  const at = boxes.findIndex(({ bottom }) => bottom > edge);
  const end = scroll.scrollHeight - scroll.scrollTop - scroll.clientHeight < 2;
  sessionStorage.setItem(KEY, JSON.stringify({ id, at, into: at < 0 ? 0 : edge - boxes[at].top, end }));
}

/** Scrolls to the position stored by `savePlace`; to the end for another conversation. */
export function restorePlace(id, scroll, messages) {
  const place = JSON.parse(sessionStorage.getItem(KEY) ?? "{}");
  const message = place.id === id && !place.end ? messages.children[place.at] : undefined;
  if (!message) scroll.scrollTop = scroll.scrollHeight;
  else scroll.scrollTop += message.getBoundingClientRect().top - scroll.getBoundingClientRect().top + place.into;
}
