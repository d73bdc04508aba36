// The alternatives at one token's position, with the token itself.

import type { JSX } from "preact";
import { useEffect, useMemo, useRef } from "preact/hooks";
import { fetchNext, fetchVocabulary } from "../api";
import { useRequest } from "../useRequest";
import { fill, useStrings } from "../i18n/strings";
import { chance } from "../next/rankedTokens";
import { Row } from "../sampler/row";
import { Track } from "../ui/bars";
import { visible } from "../ui/tokenText";
import { grouped } from "../ui/format";
import { Status } from "../ui/requestStatus";
import { Figures } from "./tokenFacts";
import { fits } from "./storedText";
import { everyToken, windowStart, type Score } from "./score";
import { spell, textOf } from "./tokenSpelling";
import { Heads } from "../ui/factsTable";

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

  // The same context that was used for scoring.
  const ids = tokens.slice(windowStart(position, score), position).map(({ id }) => id);
  const request = useRequest(`alternatives ${JSON.stringify([model, ids])}`, async (signal): Promise<Found> => {
    const [answer, texts] = await Promise.all([fetchNext({ model, ids }, signal), fetchVocabulary(model)]);
    return { row: new Row(answer.logits), texts };
  });
  const found = request.current ? request.data : undefined;

  const section = useRef<HTMLElement>(null);
  const close = useReturnFocus(section, position, onClose);
  const before = spelled.slice(Math.max(0, position - BEFORE), position).map(({ own }) => own);
  // The page Next token reads a text from its start, so this window must start there too.
  const prefix = windowStart(position, score) === 0 ? textOf(tokens.slice(0, position)) : undefined;
  const link =
    prefix && fits(prefix) ? `/next?${new URLSearchParams({ ...shared(), model, prompt: prefix })}` : undefined;
  const own = found && token ? found.row.rankOf(token.id) : -1;
  const places = Array.from({ length: Math.min(TOP, found?.row.ids.length ?? 0) }, (_, place) => place);
  if (own >= TOP) places.push(own);
  return (
    <section
      ref={section}
      class="drawer"
      data-chart="drawer"
      aria-labelledby="drawer-title"
      aria-busy={request.loading}
    >
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
      {token ? <Figures shown={spelled[position]?.shown ?? ""} token={token} /> : null}
      {request.error ? <Status request={request} waiting="" /> : null}
      {found && token ? (
        <table class="bars" data-chart="distribution">
          <caption>{fill(s.likely, { n: grouped(found.row.ids.length) })}</caption>
          <Heads of={[[s.measures.rank, "figure"], common.token, [s.measures.p, "figure"]]} bar />
          <tbody>
            {places.map((place) => {
              const id = found.row.ids[place] ?? 0;
              return (
                <tr key={id} class={place === own ? "own" : undefined} data-id={id} data-p={found.row.p(place)}>
                  <td class="figure">{grouped(place + 1)}</td>
                  <th scope="row">
                    <bdi class="token">{visible(found.texts[id] ?? String(id))}</bdi>
                    {place === own ? <small class="here"> {s.here}</small> : null}
                  </th>
                  <td class="figure">{chance(found.row.p(place))}</td>
                  <td class="bar">
                    <Track share={found.row.p(place)} tone={place === own ? "own" : "plain"} />
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

/** Escape closes the panel; focus returns to the element that opened it, or to the map. */
function useReturnFocus(
  section: { readonly current: HTMLElement | null },
  position: number,
  onClose: () => void,
): () => void {
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
