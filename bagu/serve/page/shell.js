// The page's frame: the sidebar with the conversations, the panels at the right, and which of them are open. In a narrow window they
// overlay the conversation, which is dimmed.

import { loadLook, saveLook } from "./store.js";

const $ = (id) => document.getElementById(id);
const PANELS = ["settings", "engine"];

export const look = loadLook();
let panelChanged = () => {};
export const narrow = () => matchMedia("(max-width: 760px)").matches;
const overlaid = () => matchMedia("(max-width: 1080px)").matches;
const sidebarOpen = () => !document.body.classList.contains("no-sidebar");

export function change(part) {
  Object.assign(look, part);
  saveLook(look);
}

function shade() {
  $("shade").hidden = !((narrow() && sidebarOpen()) || (overlaid() && look.panel));
}

export function showSidebar(open) {
  document.body.classList.toggle("no-sidebar", !open);
  $("menu").setAttribute("aria-expanded", open);
  if (!narrow()) change({ sidebar: open });
  shade();
}

/** Opens one panel, or none for null. */
export function openPanel(name) {
  change({ panel: name });
  for (const one of PANELS) {
    $(one).hidden = one !== name;
    $(`open-${one}`).setAttribute("aria-expanded", one === name);
  }
  shade();
  panelChanged(name);
}

/** Closes what overlays the conversation. */
export function closeOverlay() {
  if ($("shade").hidden) return;
  if (overlaid()) openPanel(null);
  if (narrow()) showSidebar(false);
}

/** `changed` is called with the name of the open panel, or null, when a panel opens or closes. */
export function startShell(changed) {
  panelChanged = changed;
  const close = (name) => (openPanel(null), $(`open-${name}`).focus()); // otherwise the focus is lost with the button
  $("menu").addEventListener("click", () => showSidebar(!sidebarOpen()));
  $("shade").addEventListener("click", closeOverlay);
  for (const one of PANELS) {
    $(`open-${one}`).addEventListener("click", () => openPanel(look.panel === one ? null : one));
    $(one).querySelector(".close").addEventListener("click", () => close(one));
  }
  window.addEventListener("resize", shade);
  showSidebar(look.sidebar && !narrow());
  openPanel(overlaid() ? null : look.panel);
}
