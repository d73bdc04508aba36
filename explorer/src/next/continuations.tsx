// Continuations by greedy decoding, this sampler and beam search, side by side.
//
// The address says whether they are shown, so that a reload generates them again. Changed settings mark
// them as outdated.

import type { JSX } from "preact";
import { useState } from "preact/hooks";
import { postStream, type Path, type Paths as Ways } from "../api";
import { fill, useStrings } from "../i18n/strings";
import { Slider } from "../ui/controls";
import { fixed } from "../ui/format";
import { Status } from "../ui/requestStatus";
import { flag, integer, useParam } from "../url";
import { useRequest } from "../useRequest";
import { TokenText, joined, visible } from "../ui/tokenText";
import type { LibraryOptions } from "../sampler/options";

const NAMES = ["greedy", "sampler", "beam"] as const;

interface PathsProps {
  readonly model: string;
  readonly prompt: readonly number[];
  readonly output: readonly number[];
  readonly options: LibraryOptions;
  tokenText(id: number): string;
  /** Continue with these tokens. */
  onTake(ids: readonly number[]): void;
}

export function Paths({ model, prompt, output, options, tokenText, onTake }: PathsProps): JSX.Element {
  const { next: s } = useStrings();
  const [wanted, setWanted] = useParam("paths", flag(false));
  const [tokens, setTokens] = useParam("n", integer(16, 1, 64));
  const [beams, setBeams] = useParam("beams", integer(4, 2, 8));
  const settings = { tokens, beams, sampler: options };
  // The settings that the shown continuations were made with; others take effect on the button.
  const [used, setUsed] = useState(settings);
  const question = { model, ids: prompt, more: output, ...used };
  const request = useRequest<Ways>(wanted ? `paths ${JSON.stringify(question)}` : undefined, (signal, partial) =>
    postStream("/api/paths", question, signal, partial),
  );
  const found = request.current ? request.data : undefined;
  const outdated = JSON.stringify(used) !== JSON.stringify(settings);
  const generate = (): void => {
    setUsed(settings);
    if (!wanted) setWanted(true);
    else if (!outdated) request.retry();
  };

  return (
    <section class="paths" aria-label={s.paths.title}>
      <h2>{s.paths.title}</h2>
      <p class="note">{s.paths.lead}</p>
      <div class="controls pair">
        <Slider name="n" label={s.paths.tokens} value={tokens} low={1} high={64} onMove={(x) => setTokens(x, true)} />
        <Slider name="beams" label={s.paths.beams} value={beams} low={2} high={8} onMove={(x) => setBeams(x, true)} />
      </div>
      <div class="controls buttons">
        <button type="button" data-do="paths" disabled={request.loading} onClick={generate}>
          {wanted ? s.paths.again : s.paths.ask}
        </button>
        <span class="note" role="status" data-chart="outdated">
          {outdated && found ? s.paths.stale : ""}
        </span>
      </div>
      {wanted ? <Status request={request} waiting={s.paths.waiting} /> : null}
      {found ? (
        <div class="ways" data-chart="paths">
          {NAMES.map((name) =>
            found[name] ? <Way key={name} path={found[name]} {...used} tokenText={tokenText} onTake={onTake} /> : null,
          )}
        </div>
      ) : null}
    </section>
  );
}

interface WayProps {
  readonly path: Path;
  readonly beams: number;
  /** How many tokens were requested. */
  readonly tokens: number;
  tokenText(id: number): string;
  onTake(ids: readonly number[]): void;
}

function Way({ path, beams, tokens: wanted, tokenText, onTake }: WayProps): JSX.Element {
  const { next: s, common } = useStrings();
  const { name, tokens, log_prob, ended } = path;
  const ids = tokens.map(({ id }) => id);
  const titles = { greedy: s.paths.greedy, sampler: s.paths.sampler, beam: fill(s.paths.beam, { n: beams }) };
  return (
    <article class="panel way" data-path={name} data-log-prob={log_prob} data-ids={ids.join()}>
      <h3>{titles[name]}</h3>
      <p class="continuation">
        <bdi>{joined(ids.map(tokenText))}</bdi>
      </p>
      <p class="headline">
        {fill(s.paths.total, { total: fixed(log_prob, 2), each: fixed(log_prob / tokens.length, 2) })}
      </p>
      <p class="note">
        {ended
          ? s.paths.ended
          : tokens.length < wanted
            ? fill(s.paths.partial, { n: tokens.length, all: wanted })
            : s.paths.open}
      </p>
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
                    aria-label={fill(s.paths.until, { token: visible(tokenText(token.id)) })}
                    onClick={() => onTake(ids.slice(0, at + 1))}
                  >
                    <TokenText text={tokenText(token.id)} />
                  </button>
                </th>
                <td>{token.log_prob === null ? "…" : fixed(token.log_prob, 3)}</td>
                {name === "sampler" ? <td>{fixed(token.sampler_log_prob ?? 0, 3)}</td> : null}
              </tr>
            ))}
          </tbody>
        </table>
      </details>
    </article>
  );
}
