// Search over the conversations: titles and the messages of all branches.

const AROUND = 32; // characters before the first match in a snippet
const LENGTH = 120;

/** The conversations that contain every word of `query`, as `{chat, snippet}`. `snippet` is the text around the first
 * word that is found in a message, or null. */
export function search(chats, query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  const found = chats.map((chat) => {
    const texts = [chat.title, ...chat.messages.map(({ content }) => content)];
    const lower = texts.map((text) => text.toLowerCase());
    return words.every((word) => lower.some((text) => text.includes(word))) && { chat, snippet: snippet(texts, words) };
  });
  return found.filter(Boolean);
}

function snippet(texts, words) {
  for (const text of texts.slice(1)) {
    const places = words.map((word) => text.toLowerCase().indexOf(word)).filter((at) => at >= 0);
    if (!places.length) continue;
    const start = Math.max(0, Math.min(...places) - AROUND);
    return (start ? "…" : "") + text.slice(start, start + LENGTH).replace(/\s+/g, " ");
  }
  return null;
}
