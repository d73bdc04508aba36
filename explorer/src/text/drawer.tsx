// One token opened: what the model held possible at its place, and where the token itself was.

import type { JSX } from "preact";
import { useEffect, useMemo, useRef } from "preact/hooks";
import { next, vocabulary } from "../ask";
import { useAsked } from "../asked";
import { fill, useStrings } from "../i18n";
import { chance } from "../next/ranked";
import { Row } from "../next/row";
import { visible } from "../next/tokens";
import { whole } from "../ui/format";
import { Status } from "../ui/status";
import { Figures } from "./figures";
import { fits } from "./keep";
import { everyToken, windowStart, type Score } from "./score";
import { spell, textOf } from "./spell";

const [TOP, BEFORE] = [10, 24];

interface DrawerProps {
  readonly model: string;
  readonly score: Score;
  readonly position: number;
  onClose(): void;
}

interface Found {
  readonly row: Row;
  readonly texts: readonly string[];
}

export function Drawer({ model, score, position, onClose }: DrawerProps): JSX.Element {
  const { text: s, common } = useStrings();
  const tokens = useMemo(() => everyToken(score), [score]);
  const spelled = useMemo(() => spell(tokens), [tokens]);
  const token = score.tokens[position - 1];

  // The same tokens that the model saw when it scored this one.
  const ids = tokens.slice(windowStart(position, score), position).map(({ id }) => id);
  const asked = useAsked(JSON.stringify([model, ids]), async (signal): Promise<Found> => {
    const [answer, texts] = await Promise.all([next({ model, ids }, signal), vocabulary(model)]);
    return { row: new Row(answer.logits), texts };
  });
  const found = asked.current ? asked.found : undefined;

  const section = useRef<HTMLElement>(null);
  const close = useWayBack(section, position, onClose);
  const before = spelled.slice(Math.max(0, position - BEFORE), position).map(({ own }) => own);
  // On the other page the text is read from its beginning: only where this one was, too.
  const prefix = windowStart(position, score) === 0 ? textOf(tokens.slice(0, position)) : undefined;
  const link = prefix && fits(prefix) ? `/next?${new URLSearchParams({ ...shared(), model, prompt: prefix })}` : undefined;
  const own = found && token ? found.row.placeOf(token.id) : -1;
  const places = Array.from({ length: Math.min(TOP, found?.row.ids.length ?? 0) }, (_, place) => place);
  if (own >= TOP) places.push(own);
  const most = found?.row.p(0) ?? 1;
  return (
    <section ref={section} class="drawer" data-chart="drawer" aria-labelledby="drawer-title" aria-busy={asked.waiting}>
      <header>
        <h2 id="drawer-title">{s.drawer}</h2>
        <button type="button" class="quiet" data-do="close" onClick={close}>
          {s.close}
        </button>
      </header>
      <p class="context">
        <bdi>{before.join("").slice(-60)}</bdi>
        <span class="blank">___</span>
      </p>
      {token ? <Figures word={spelled[position]?.shown ?? ""} token={token} /> : null}
      {asked.failed ? <Status asked={asked} waiting="" /> : null}
      {found && token ? (
        <table class="bars" data-chart="distribution">
          <caption>{fill(s.likely, { n: whole(found.row.ids.length) })}</caption>
          <thead>
            <tr>
              <th scope="col" class="figure">{s.measures.rank}</th>
              <th scope="col">{common.word}</th>
              <th scope="col" class="figure">{s.measures.p}</th>
              <td class="bar" />
            </tr>
          </thead>
          <tbody>
            {places.map((place) => {
              const id = found.row.ids[place] ?? 0;
              return (
                <tr key={id} class={place === own ? "own" : undefined} data-id={id} data-p={found.row.p(place)}>
                  <td class="figure">{whole(place + 1)}</td>
                  <th scope="row">
                    <bdi class="token">{visible(found.texts[id] ?? String(id))}</bdi>
                    {place === own ? <small class="here"> {s.here}</small> : null}
                  </th>
                  <td class="figure">{chance(found.row.p(place))}</td>
                  <td class="bar">
                    <div class="track" aria-hidden="true">
                      <div class={place === own ? "fill own" : "fill plain"} style={{ left: "0", width: `${(100 * found.row.p(place)) / most}%` }} />
                    </div>
                  </td>
                </tr>
              );
            })}
          </tbody>
        </table>
      ) : null}
      {link ? (
        <p>
          <a href={link}>{s.onNext}</a>
        </p>
      ) : null}
    </section>
  );
}

/** Escape closes, wherever the focus is; from within, it goes back to what opened the drawer, or to the map. */
function useWayBack(section: { readonly current: HTMLElement | null }, position: number, onClose: () => void): () => void {
  const opener = useRef<Element | null>(null);
  useEffect(() => {
    const now = document.activeElement;
    if (now && now !== document.body && !section.current?.contains(now)) opener.current = now;
  }, [position]);
  const close = (): void => {
    if (section.current?.contains(document.activeElement)) {
      const from = opener.current?.isConnected ? opener.current : document.querySelector('[data-chart="heat"]');
      (from as HTMLElement | null)?.focus();
    }
    onClose();
  };
  useEffect(() => {
    const listen = (event: KeyboardEvent): void => void (event.key === "Escape" && !event.defaultPrevented && close());
    document.addEventListener("keydown", listen);
    return () => document.removeEventListener("keydown", listen);
  });
  return close;
}

/** What every page keeps: language and colours. */
function shared(): Record<string, string> {
  const now = new URLSearchParams(location.search);
  return Object.fromEntries(["lang", "theme"].flatMap((name) => (now.has(name) ? [[name, now.get(name) ?? ""]] : [])));
}
