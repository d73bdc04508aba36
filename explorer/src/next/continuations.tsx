// Continuations by greedy decoding, this sampler and beam search, side by side.
//
// The address says whether they are shown, so that a reload generates them again. Changed settings mark
// them as outdated.

import type { JSX } from "preact";
import { useEffect, useState } from "preact/hooks";
import { fetchPaths, type Path, type ServerError } from "../api";
import { fill, useStrings } from "../i18n/strings";
import { Slider } from "../ui/controls";
import { fixed } from "../ui/format";
import { errorText } from "../ui/requestStatus";
import { flag, integer, useParam } from "../url";
import { TokenText, joined, visible } from "../ui/tokenText";
import type { LibraryOptions } from "../sampler/options";

interface PathsProps {
  readonly model: string;
  readonly prompt: readonly number[];
  readonly output: readonly number[];
  readonly options: LibraryOptions;
  say(id: number): string;
  /** Continue with these tokens. */
  onTake(ids: readonly number[]): void;
}

interface Found {
  readonly key: string;
  readonly beams: number;
  readonly paths: readonly Path[];
}

export function Paths({ model, prompt, output, options, say, onTake }: PathsProps): JSX.Element {
  const { next: s, errors } = useStrings();
  const [wanted, setWanted] = useParam("paths", flag(false));
  const [tokens, setTokens] = useParam("n", integer(16, 1, 64));
  const [beams, setBeams] = useParam("beams", integer(4, 2, 8));
  const [again, setAgain] = useState(0);
  const [found, setFound] = useState<Found>();
  const [failed, setFailed] = useState<ServerError>();
  const [waiting, setWaiting] = useState(false);
  const text = JSON.stringify([model, prompt, output]);
  const question = { tokens: tokens, beams: beams, sampler: options };
  const key = JSON.stringify(question);

  useEffect(() => {
    setFound(undefined);
    setFailed(undefined);
    setWaiting(wanted);
    if (!wanted) return;
    const stop = new AbortController();
    fetchPaths({ model, ids: prompt, more: output, ...question }, stop.signal).then(
      (answer) => {
        setFound({ key, beams: question.beams, paths: answer });
        setWaiting(false);
      },
      (error: ServerError) => {
        if (stop.signal.aborted) return;
        setFailed(error);
        setWaiting(false);
      },
    );
    return () => stop.abort();
  }, [wanted, text, again]); // not the settings, which take effect on the button

  return (
    <section class="paths" aria-label={s.paths.title}>
      <h2>{s.paths.title}</h2>
      <p class="note">{s.paths.lead}</p>
      <div class="controls pair">
        <Slider
          name="n"
          label={s.paths.tokens}
          value={tokens}
          low={1}
          high={64}
          step={1}
          onMove={(x) => setTokens(x, true)}
        />
        <Slider
          name="beams"
          label={s.paths.beams}
          value={beams}
          low={2}
          high={8}
          step={1}
          onMove={(x) => setBeams(x, true)}
        />
      </div>
      <div class="controls buttons">
        <button
          type="button"
          data-do="paths"
          disabled={waiting}
          onClick={() => (wanted ? setAgain(again + 1) : setWanted(true))}
        >
          {wanted ? s.paths.again : s.paths.ask}
        </button>
        <span class={failed ? "note alarm" : "note"} role="status">
          {failed
            ? errorText(failed, errors)
            : waiting
              ? s.paths.waiting
              : found && found.key !== key
                ? s.paths.stale
                : ""}
        </span>
      </div>
      {found ? (
        <div class="ways" data-chart="paths">
          {found.paths.map((one) => (
            <Way key={one.name} path={one} beams={found.beams} say={say} onTake={onTake} />
          ))}
        </div>
      ) : null}
    </section>
  );
}

interface WayProps {
  readonly path: Path;
  readonly beams: number;
  say(id: number): string;
  onTake(ids: readonly number[]): void;
}

function Way({ path, beams, say, onTake }: WayProps): JSX.Element {
  const { next: s, common } = useStrings();
  const { name, tokens, log_prob, ended } = path;
  const ids = tokens.map(({ id }) => id);
  const titles = { greedy: s.paths.greedy, sampler: s.paths.sampler, beam: fill(s.paths.beam, { n: beams }) };
  return (
    <article class="panel way" data-path={name} data-log-prob={log_prob} data-ids={ids.join()}>
      <h3>{titles[name]}</h3>
      <p class="said">
        <bdi>{joined(ids.map(say))}</bdi>
      </p>
      <p class="headline">
        {fill(s.paths.total, { total: fixed(log_prob, 2), each: fixed(log_prob / tokens.length, 2) })}
      </p>
      <p class="note">{ended ? s.paths.ended : s.paths.open}</p>
      <div class="controls buttons">
        <button type="button" onClick={() => onTake(ids)}>
          {fill(s.paths.take, { n: ids.length })}
        </button>
      </div>
      <details>
        <summary>{s.paths.each}</summary>
        <table class="facts">
          <thead>
            <tr>
              <th scope="col">{common.token}</th>
              <th scope="col">{s.paths.log_p}</th>
              {name === "sampler" ? <th scope="col">{s.paths.sampler_log_p}</th> : null}
            </tr>
          </thead>
          <tbody>
            {tokens.map((token, at) => (
              <tr key={at} data-log-prob={token.log_prob}>
                <th scope="row">
                  <button
                    type="button"
                    class="token-button"
                    aria-label={fill(s.paths.until, { token: visible(say(token.id)) })}
                    onClick={() => onTake(ids.slice(0, at + 1))}
                  >
                    <TokenText text={say(token.id)} />
                  </button>
                </th>
                <td>{fixed(token.log_prob, 3)}</td>
                {name === "sampler" ? <td>{fixed(token.sampler_log_prob ?? 0, 3)}</td> : null}
              </tr>
            ))}
          </tbody>
        </table>
      </details>
    </article>
  );
}
