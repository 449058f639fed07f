// One streamed answer: its text, its tokens, and its speed.

import { addSources } from "./sources.js";
import { messageParts } from "./think.js";
import { readToken } from "./tokens.js";
import { addCalls } from "./toolcalls.js";

const SHORTEST_S = 0.1;

export const newAnswer = (model) => ({ role: "assistant", content: "", model, _tokens: [] });

/** Adds the chunks of a stream to `message`; calls `changed` at most once per frame, for any number of tokens. */
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
  const thought = choice?.delta?.reasoning_content ?? "";
  const calls = choice?.delta?.tool_calls ?? [];
  const tokens = choice?.logprobs?.content ?? [];
  const now = performance.now();
  const grew = text || thought || calls.length || tokens.length;
  if (grew) {
    clock.first ??= now;
    clock.count += tokens.length || 1; // one per chunk without logprobs; the usage at the end corrects it
  }
  message.content += text;
  if (thought) message.reasoning = (message.reasoning ?? "") + thought;
  addCalls(message, calls);
  addSources(message, choice?.delta ?? {});
  message._tokens.push(...tokens.map((token, at) => readToken(token, at === tokens.length - 1 ? thought + text : "")));
  message.finish = choice?.finish_reason ?? message.finish;
  message.tokens = chunk.usage?.completion_tokens ?? clock.count;
  if (clock.first === null) return;
  clock.last = grew ? now : clock.last;
  message.ttft_ms = clock.first - clock.began;
  timeThoughts(message, text, clock, now);
  // The first token belongs to the prefill, the others to decoding. A very short time gives no meaningful rate.
  const seconds = (clock.last - clock.first) / 1000;
  message.tokens_per_s = message.tokens > 1 && seconds > SHORTEST_S ? (message.tokens - 1) / seconds : null;
}

/** Sets `thoughts_ms`, the duration of each thought. If only the end of a thought is in the answer, the chat template
 * wrote its <think>, and the thought began with the answer. */
function timeThoughts(message, text, clock, now) {
  const reasons = message.reasoning && !clock.thoughts[0]?.ended;
  if (reasons || text.includes(">")) {
    for (const { thought, open } of messageParts(message).filter((part) => part.thought !== null)) {
      clock.thoughts[thought] ??= { began: open ? now : clock.first, ended: null };
      if (!open) clock.thoughts[thought].ended ??= now;
    }
  }
  if (clock.thoughts.length) message.thoughts_ms = clock.thoughts.map(({ began, ended }) => (ended ?? now) - began);
}
