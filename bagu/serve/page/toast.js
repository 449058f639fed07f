// A notice at the bottom of the page.

import { el } from "./dom.js";

const SHOWN_MS = 8000;
let timer;

/** Shows `text`, with a button if `action` (`{name, press}`) is given. */
export function toast(text, action = null) {
  const box = document.getElementById("toast");
  const click = () => {
    box.hidden = true;
    action.press();
  };
  const press = action && el("button", { type: "button", on: { click } }, action.name);
  box.replaceChildren(el("span", {}, text), press || "");
  box.hidden = false;
  clearTimeout(timer);
  timer = setTimeout(() => (box.hidden = true), SHOWN_MS);
}
