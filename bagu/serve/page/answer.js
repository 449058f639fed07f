// One answer as it comes in: its text, its tokens, and what it took.

import { parts } from "./think.js";
import { readToken } from "./tokens.js";

const SHORTEST_S = 0.1;

export const newAnswer = () => ({ role: "assistant", content: "", _tokens: [] });

/** Adds the chunks of a stream to `message`; `changed` is called at most once a frame, however many tokens came. */
export async function receive(message, chunks, changed) {
  const clock = { began: performance.now(), first: null, count: 0, thoughts: [] };
  let scheduled = false;
  for await (const chunk of chunks) {
    add(message, chunk, clock);
    if (!scheduled) {
      scheduled = true;
      requestAnimationFrame(() => {
        scheduled = false;
        changed();
      });
    }
  }
}

function add(message, chunk, clock) {
  const [choice] = chunk.choices;
  const text = choice?.delta?.content ?? "";
  const tokens = choice?.logprobs?.content ?? [];
  const now = performance.now();
  if (text || tokens.length) {
    clock.first ??= now;
    clock.count += tokens.length || 1; // a chunk is a token unless the server says more; usage corrects it
  }
  message.content += text;
  message._tokens.push(...tokens.map((token, at) => readToken(token, at === tokens.length - 1 ? text : "")));
  message.finish = choice?.finish_reason ?? message.finish;
  message.tokens = chunk.usage?.completion_tokens ?? clock.count;
  if (clock.first === null) return;
  clock.last = text || tokens.length ? now : clock.last;
  message.ttft_ms = clock.first - clock.began;
  timeThoughts(message, text, clock, now);
  // The first token is the prefill's: what comes after it is decoding. Of a burst there is no rate.
  const seconds = (clock.last - clock.first) / 1000;
  message.tokens_per_s = message.tokens > 1 && seconds > SHORTEST_S ? (message.tokens - 1) / seconds : null;
}

/** Sets `thoughts_ms`, the duration of each thought. One that is first seen when it ends had its <think> from the chat
 * template, and began with the answer. */
function timeThoughts(message, text, clock, now) {
  if (text.includes(">")) {
    for (const { thought, open } of parts(message.content).filter((part) => part.thought !== null)) {
      clock.thoughts[thought] ??= { began: open ? now : clock.first, ended: null };
      if (!open) clock.thoughts[thought].ended ??= now;
    }
  }
  if (clock.thoughts.length) message.thoughts_ms = clock.thoughts.map(({ began, ended }) => (ended ?? now) - began);
}
