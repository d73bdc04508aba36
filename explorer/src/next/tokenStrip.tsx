// The tokens of the text, with buttons to add one, undo and branch.

import type { JSX } from "preact";
import { useRef } from "preact/hooks";
import { fill, useStrings } from "../i18n/strings";
import { useKeptFocus } from "../ui/useKeptFocus";
import { spell } from "../text/tokenSpelling";
import { MAX_BRANCHES, close, fork, goTo, open, path, type Branches } from "./branches";
import { TokenText, ending, joined, visible } from "../ui/tokenText";
import type { Reading } from "./useNext";

interface WrittenProps {
  /** The prediction that is shown; of the last branch while the current one is loading. */
  readonly reading: Reading;
  readonly branches: Branches;
  /** The id that the sampler draws. */
  readonly sampled: number;
  tokenText(id: number): string;
  onChange(to: Branches): void;
}

export function TokenStrip({ reading, branches, sampled, tokenText, onChange }: WrittenProps): JSX.Element {
  const { next: s } = useStrings();
  const section = useRef<HTMLElement>(null);
  useKeptFocus(section, (held) =>
    held.closest("nav") ? ["nav [aria-current]", "[data-do=branch]"] : ["[data-do=step]"],
  );
  const { prompt: tokens, context } = reading;
  const spelled = spell(tokens); // a character of several tokens is shown at the first
  const here = path(branches);
  const prompt = context.prompt.length;
  const full = branches.all.length >= MAX_BRANCHES;
  return (
    <section ref={section} class="written" aria-label={s.tokens}>
      <p class="pieces" data-chart="pieces">
        {tokens.map(({ id, text }, at) => {
          const shown = text.includes("\ufffd") ? (
            <bdi class="token">{spelled[at]?.shown}</bdi>
          ) : (
            <TokenText text={text} />
          );
          const title = `${fill(s.position, { n: at + 1 })}, ${s.id} ${id}`;
          const back = context.output.slice(0, at - prompt + 1);
          return at < prompt || at === tokens.length - 1 ? (
            <span key={at} class={at < prompt ? "piece" : "piece new"} title={title}>
              {shown}
            </span>
          ) : (
            <button
              key={at}
              type="button"
              class="piece new"
              disabled={full}
              title={title}
              aria-label={fill(s.branch_at, { token: visible(tokenText(id)) })}
              onClick={() => onChange(fork(branches, back))}
            >
              {shown}
            </button>
          );
        })}
        <span class="blank">___</span>
      </p>
      <div class="controls buttons">
        <button type="button" data-do="step" onClick={() => onChange(goTo(branches, [...context.output, sampled]))}>
          {s.step}
          <TokenText text={tokenText(sampled)} />
        </button>
        <button
          type="button"
          data-do="undo"
          disabled={!here.length}
          onClick={() => onChange(goTo(branches, here.slice(0, -1)))}
        >
          {s.undo}
        </button>
        <button type="button" data-do="branch" disabled={full} onClick={() => onChange(fork(branches, here))}>
          {s.branch}
        </button>
      </div>
      {branches.all.length > 1 ? <Tabs branches={branches} tokenText={tokenText} onChange={onChange} /> : null}
    </section>
  );
}

function Tabs({
  branches,
  tokenText,
  onChange,
}: Pick<WrittenProps, "branches" | "tokenText" | "onChange">): JSX.Element {
  const { next: s } = useStrings();
  return (
    <nav class="branches" aria-label={s.branches} data-chart="branches">
      <span class="note">{s.branches}</span>
      <ul>
        {branches.all.map((one, at) => {
          const name = one.length ? ending(joined(one.map(tokenText))) || visible(joined(one.map(tokenText))) : s.start;
          return (
            <li key={at} class={at === branches.current ? "here" : undefined}>
              <button
                type="button"
                class="open"
                aria-current={at === branches.current ? "true" : undefined}
                aria-label={fill(s.open, { name: `${at + 1} ${name}` })}
                onClick={() => onChange(open(branches, at))}
              >
                <small>{at + 1}</small> <bdi>{name}</bdi>
              </button>
              <button
                type="button"
                class="close"
                aria-label={fill(s.close, { name: `${at + 1} ${name}` })}
                onClick={() => onChange(close(branches, at))}
              >
                ×
              </button>
            </li>
          );
        })}
      </ul>
    </nav>
  );
}
