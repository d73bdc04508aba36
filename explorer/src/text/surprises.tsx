// The most surprising tokens with the text before them; and all tokens as a table.

import type { JSX } from "preact";
import { useMemo, useState } from "preact/hooks";
import { fill, useStrings } from "../i18n/strings";
import { grouped } from "../ui/format";
import { MEASURES, SCALES } from "./textMeasures";
import { everyToken, type Score, type Scored } from "./score";
import { spell } from "./tokenSpelling";
import { Heads } from "../ui/factsTable";

const [WORST, BEFORE, AFTER, EXCERPT, PORTION] = [12, 14, 8, 28, 200];

interface ListProps {
  readonly score: Score;
  onOpen(position: number): void;
}

const MIN_BITS = 1; // less: the model gave the token more than half of the probability

/** The last characters of a text, starting after white space. */
export function excerpt(text: string, length: number): string {
  if (text.length <= length) return text;
  const end = text.slice(-length);
  const cut = /\S/.test(text.charAt(text.length - length - 1)) ? end.search(/\s/) : 0;
  return cut > 0 ? end.slice(cut + 1) : end;
}

// A letter or digit of a script that separates by spaces.
const LETTER = /[^\P{Alphabetic}\p{Script=Han}\p{Script=Hiragana}\p{Script=Katakana}\p{Script=Thai}]|[\p{N}'’]/u;

/** The letters up to the next space or sign, if a token ends with a letter. */
export function lettersAfter(token: string, following: string): string {
  const letters = [...following];
  const end = letters.findIndex((letter) => !LETTER.test(letter));
  return LETTER.test([...token].at(-1) ?? "") ? letters.slice(0, end < 0 ? undefined : end).join("") : "";
}

/** The tokens with the largest surprisal, without first choices of the model; equal ones in text order. */
export function mostSurprising(tokens: readonly Scored[], count: number): Scored[] {
  return tokens
    .filter(({ bits, rank }) => rank > 0 && (bits ?? Infinity) >= MIN_BITS)
    .sort((a, b) => (b.bits ?? Infinity) - (a.bits ?? Infinity) || a.position - b.position)
    .slice(0, count);
}

export function MostSurprising({ score, onOpen }: ListProps): JSX.Element {
  const { text: s } = useStrings();
  const spelled = useMemo(() => spell(everyToken(score)), [score]);
  const found = useMemo(() => mostSurprising(score.tokens, WORST), [score]);
  return (
    <table class="facts surprises" data-chart="worst">
      <caption>{s.worst}</caption>
      <Heads
        of={[
          s.inText,
          [fill(s.withUnit, { measure: s.measures.bits, unit: s.units.bits }), "figure"],
          [s.measures.rank, "figure"],
        ]}
      />
      <tbody>
        {found.map((token) => {
          const before = spelled.slice(Math.max(0, token.position - BEFORE), token.position);
          const shown = spelled[token.position]?.shown ?? "";
          // A token's leading space is not underlined: it may be the end of a line.
          const gap = /^ (?=\S)/.test(shown) ? " " : "";
          const after = spelled.slice(token.position + 1, token.position + 1 + AFTER);
          return (
            <tr key={token.position} data-position={token.position}>
              <th scope="row">
                <button
                  type="button"
                  class="spot"
                  aria-label={fill(s.openAt, { token: shown })}
                  onClick={() => onOpen(token.position)}
                >
                  <bdi class="before">{excerpt(before.map(({ own }) => own).join(""), EXCERPT).trimStart() + gap}</bdi>
                  <bdi class="that">{shown.slice(gap.length)}</bdi>
                  <bdi class="before">{lettersAfter(shown, after.map(({ own }) => own).join(""))}</bdi>
                </button>
              </th>
              <td class="figure">{SCALES.bits.show(SCALES.bits.of(token))}</td>
              <td class="figure">{SCALES.rank.show(token.rank)}</td>
            </tr>
          );
        })}
      </tbody>
    </table>
  );
}

export function TokenTable({ score }: { score: Score }): JSX.Element {
  const { text: s, common } = useStrings();
  const [open, setOpen] = useState(false);
  const [count, setCount] = useState(PORTION);
  const spelled = useMemo(() => spell(everyToken(score)), [score]);
  return (
    <details class="all" data-picture="none" onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>{common.numbers}</summary>
      {open ? (
        <>
          <table class="facts" data-chart="tokens">
            <thead>
              <tr>
                <th scope="col" class="figure">
                  {s.position}
                </th>
                <th scope="col">{s.token}</th>
                {MEASURES.map((measure) => (
                  <th key={measure} scope="col" class="figure">
                    {measure in s.units
                      ? fill(s.withUnit, {
                          measure: s.measures[measure],
                          unit: s.units[measure as keyof typeof s.units],
                        })
                      : s.measures[measure]}
                  </th>
                ))}
              </tr>
            </thead>
            <tbody>
              {score.tokens.slice(0, count).map((token) => (
                <tr key={token.position}>
                  <td class="figure">{grouped(token.position + 1)}</td>
                  <th scope="row">
                    <bdi class="token">{spelled[token.position]?.shown}</bdi>
                  </th>
                  {MEASURES.map((measure) => (
                    <td key={measure} class="figure">
                      {SCALES[measure].show(SCALES[measure].of(token))}
                    </td>
                  ))}
                </tr>
              ))}
            </tbody>
          </table>
          {count < score.tokens.length ? (
            <button type="button" data-do="rows" onClick={() => setCount(count + PORTION)}>
              {fill(s.rows, { n: grouped(Math.min(PORTION, score.tokens.length - count)) })}
            </button>
          ) : null}
        </>
      ) : null}
    </details>
  );
}
