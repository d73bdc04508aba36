// The text with a color for every token. One token is in the tab order; arrow keys move, Enter opens.

import type { JSX } from "preact";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { fill, useStrings } from "../i18n/strings";
import { Figures } from "./tokenFacts";
import { level, SCALES, type Measure } from "./textMeasures";
import { everyToken, type Score } from "./score";
import { spell } from "./tokenSpelling";

interface HeatProps {
  readonly score: Score;
  readonly by: Measure;
  /** Whether to show numbers below the tokens. */
  readonly numbers: boolean;
  /** The position of the token that is open; 0 for none. */
  readonly open: number;
  onOpen(position: number): void;
}

export function Heat({ score, by, numbers, open, onOpen }: HeatProps): JSX.Element {
  const { text: s } = useStrings();
  const box = useRef<HTMLDivElement>(null);
  const [active, setActive] = useState(0);
  const spelled = useMemo(() => spell(everyToken(score)), [score]);
  const last = score.tokens.length;
  const rest = spelled.find((token) => token.rest)?.rest;
  const about = rest && fill(s.rest, { bytes: rest });

  // Thousands of tokens are rendered once; the selected one is marked by attribute, without rendering.
  const cells = useMemo(() => {
    const { of, show } = SCALES[by];
    const drawn: JSX.Element[] = [];
    spelled.forEach(({ rest, own, shown, breaks }, at) => {
      const token = score.tokens[at - 1];
      const value = token ? of(token) : NaN;
      const name = token
        ? fill(s.cell, { token: shown.trim() || shown, measure: s.measures[by], value: show(value) })
        : fill(s.firstCell, { token: shown });
      drawn.push(
        <span
          key={at}
          id={`token-${at}`}
          role="option"
          class={token ? `tok level-${level(by, value)}` : "tok unscored"}
          aria-label={name}
          aria-disabled={token ? undefined : true}
          data-at={at}
          data-value={token ? value : undefined}
        >
          <bdi>
            {rest ? (
              <span class="rest" title={about}>
                {rest}
              </span>
            ) : null}
            {own}
          </bdi>
          {numbers && token ? <small>{show(value)}</small> : null}
        </span>,
      );
      for (let line = 0; line < Math.min(breaks, 2); line++) drawn.push(<br key={`${at}-${line}`} />);
    });
    return drawn;
  }, [spelled, score, by, numbers, s]);

  useEffect(() => setActive(0), [score.first]); // the same object while the parts of a text arrive
  useEffect(() => mark(box.current, "data-active", active), [active, cells]);
  useEffect(() => mark(box.current, "aria-selected", open), [open, cells]);

  const at = (event: Event): number =>
    Number((event.target as Element).closest<HTMLElement>("[data-at]")?.dataset["at"] ?? 0);
  const walk = (event: KeyboardEvent): void => {
    const to = destination(event.key, active || open || 0, last, box.current);
    if (to !== undefined) {
      setActive(to);
      box.current?.querySelector(`#token-${to}`)?.scrollIntoView({ block: "nearest" });
    } else if ((event.key === "Enter" || event.key === " ") && active) onOpen(active);
    else return;
    event.preventDefault();
  };
  const token = score.tokens[(active || open) - 1];
  return (
    <>
      <div class="readout" data-chart="readout" data-picture="none">
        {token ? (
          <Figures shown={spelled[active || open]?.shown ?? ""} token={token} />
        ) : (
          <span class="note">{s.point}</span>
        )}
      </div>
      <div
        ref={box}
        class={numbers ? "heatmap numbered" : "heatmap"}
        data-chart="heat"
        role="listbox"
        tabIndex={0}
        aria-label={s.map}
        aria-activedescendant={active ? `token-${active}` : undefined}
        onKeyDown={walk}
        onFocus={() => setActive((now) => now || open || 1)}
        onMouseOver={(event) => at(event) && setActive(at(event))}
        onClick={(event) => at(event) && onOpen(at(event))}
      >
        {cells}
      </div>
      {about ? (
        <p class="note" data-chart="rest">
          {about}
        </p>
      ) : null}
    </>
  );
}

/** Set an attribute on one cell and remove it from all others. */
function mark(box: HTMLElement | null, name: string, at: number): void {
  box?.querySelectorAll(`[${name}]`).forEach((cell) => cell.removeAttribute(name));
  if (at) box?.querySelector(`#token-${at}`)?.setAttribute(name, "true");
}

/** The position that a key moves to; undefined for other keys. */
function destination(key: string, from: number, last: number, box: HTMLElement | null): number | undefined {
  const within = (to: number): number => Math.min(last, Math.max(1, to));
  if (key === "ArrowRight") return within(from + 1);
  if (key === "ArrowLeft") return within(from - 1);
  if (key === "Home") return 1;
  if (key === "End") return last;
  if (key !== "ArrowUp" && key !== "ArrowDown") return undefined;
  return within(otherLine(box, from, key === "ArrowDown" ? 1 : -1));
}

/** The nearest token in the line below or above. */
function otherLine(box: HTMLElement | null, from: number, step: 1 | -1): number {
  const place = (at: number): DOMRect | undefined => box?.querySelector(`#token-${at}`)?.getClientRects()[0];
  const start = place(from);
  if (!start) return from;
  const [middle, tall] = [start.left + start.width / 2, start.height / 2];
  let [best, nearest, line] = [from, Infinity, NaN];
  for (let at = from + step; ; at += step) {
    const box = place(at);
    if (!box || Math.abs(box.top - line) > tall) break;
    if (Math.abs(box.top - start.top) <= tall) continue;
    line = box.top;
    const distance = Math.abs(box.left + box.width / 2 - middle);
    if (distance < nearest) [best, nearest] = [at, distance];
  }
  return best;
}
