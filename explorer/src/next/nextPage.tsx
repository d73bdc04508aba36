// The Next token page: a prompt, the model's ranked tokens, and a sampler that acts at once.

import type { JSX } from "preact";
import { useContext, useMemo } from "preact/hooks";
import type { Model } from "../api";
import { fill, useStrings } from "../i18n/strings";
import { Models } from "../models";
import { Choice, optionsOf } from "../ui/controls";
import { ExportPanel } from "../ui/exportPanel";
import { fixed, grouped } from "../ui/format";
import { Alarm } from "../ui/prose";
import { PromptForm, useDraft } from "../ui/promptForm";
import { Status } from "../ui/requestStatus";
import { useVocabulary } from "../useRequest";
import { usePromptParam } from "../text/usePromptParam";
import { change, integer, oneOf, text, useParam } from "../url";
import { goTo, parse, path, show, type Branches } from "./branches";
import { Flow } from "./flow";
import { FindToken } from "./findToken";
import { RankCurve } from "./rankCurve";
import { nextDocument, nextLines, nextLive, nextTables, promptText, samplerText, type Shown } from "./nextExport";
import { Paths } from "./continuations";
import { CopySampler } from "./copySampler";
import { Draws } from "./draws";
import { Ranked, shownRanks, type BarScale } from "./rankedTokens";
import { QuickControls, SamplerControls } from "./samplerControls";
import { Stages } from "./stageTable";
import { TokenText } from "../ui/tokenText";
import { useNext, type Reading } from "./useNext";
import { legalStages } from "../sampler/options";
import { Processed } from "../sampler/process";
import { useSampler, type SamplerState } from "../sampler/useSampler";
import { TokenStrip } from "./tokenStrip";

const AS_IT_IS = text("");

export function NextPage(): JSX.Element {
  const {
    next: s,
    text: { textUnavailable },
  } = useStrings();
  const models = useContext(Models);
  const known = models.map(({ name }) => name);
  const [name] = useParam("model", oneOf(known[0] ?? "", known));
  const model = models.find((one) => one.name === name);
  const field = usePromptParam(model);
  const { text: prompt, to } = field;
  const draft = useDraft(field);
  const [more] = useParam("more", AS_IT_IS);
  const [others] = useParam("branches", AS_IT_IS);
  const branches = parse(more, others || null);
  const sampler = useSampler();
  const request = useNext(name, prompt, path(branches));
  // The tokens shown belong to the model of the last row until the next row has arrived.
  const reading = request.data;
  const read = models.find((one) => one.name === reading?.model);
  const texts = useVocabulary(reading?.model);
  const go = (where: Branches): void => change({ ...to(prompt ?? ""), ...show(where), paths: null });
  const restart = (what: Record<string, string | null>): void =>
    change({ more: null, branches: null, paths: null, ...what });

  return (
    <div class="next">
      <header class="intro">
        <h1>{s.title}</h1>
        <p class="note">{fill(s.lead, { model: name, n: grouped(model?.vocab_size ?? 0) })}</p>
      </header>
      <PromptForm
        name="prompt"
        label={s.prompt}
        button={s.read}
        draft={draft}
        onSubmit={(given) => {
          if (request.error && given === prompt) request.retry();
          else restart(to(given));
        }}
      />
      {prompt === undefined ? <Alarm>{textUnavailable}</Alarm> : null}
      <Status request={request} waiting={s.waiting} />
      {texts.error ? <Status request={texts} waiting="" /> : null}
      {reading && read ? (
        <div class={request.current && !draft.edited ? "prediction" : "prediction stale"} aria-busy={texts.loading}>
          <Prediction
            model={read}
            reading={reading}
            current={request.current}
            texts={(texts.current && texts.data) || []}
            branches={branches}
            sampler={sampler}
            onChange={go}
          />
        </div>
      ) : null}
    </div>
  );
}

interface PredictionProps {
  readonly model: Model;
  readonly reading: Reading;
  /** Whether it belongs to the text in the address. */
  readonly current: boolean;
  readonly texts: readonly string[];
  readonly branches: Branches;
  readonly sampler: SamplerState;
  onChange(to: Branches): void;
}

/** The prediction after a text. */
function Prediction({ model, reading, current, texts, branches, sampler, onChange }: PredictionProps): JSX.Element {
  const strings = useStrings();
  const { next: s, exports } = strings;
  const [top, setTop] = useParam("top", integer(10, 1, 500));
  const [scale, setScale] = useParam("scale", oneOf<BarScale>("linear", ["linear", "log"]));
  const { row, context } = reading;
  const { stages, order, seed, counting } = sampler;
  const settings = JSON.stringify([stages.map(({ name }) => name), sampler.options, counting, seed]);
  const processed = useMemo(() => new Processed(row, stages, { ...context, counting, seed }), [reading, settings]);
  const position = reading.prompt.length;
  const size = row.ids.length;
  const noise = useMemo(() => row.noise(seed, position), [row, seed, position]);
  const drawn = useMemo(() => processed.draw(noise), [processed, noise]);
  const ranks = useMemo(() => shownRanks(row, processed, top), [row, processed, top]);
  const mass = ranks.reduce((sum, rank) => sum + row.p(rank), 0);
  const tokenText = (id: number): string => texts[id] ?? String(id);
  const chain = { stages: legalStages(stages), order, seed };
  const shown: Shown = {
    model,
    text: reading.text,
    context,
    prompt: reading.prompt,
    row,
    processed,
    chain,
    counting,
    top,
    drawn,
  };
  const take = (...ids: number[]): void => onChange(goTo(branches, [...context.output, ...ids]));

  return (
    <>
      <TokenStrip
        reading={reading}
        branches={branches}
        sampled={row.ids[drawn] ?? 0}
        tokenText={tokenText}
        onChange={onChange}
      />
      <Flow
        model={model}
        reading={reading}
        processed={processed}
        noise={noise}
        seed={seed}
        drawn={drawn}
        tokenText={tokenText}
      />
      <div class="step bench">
        <div class="text-column controls">
          <SamplerControls sampler={sampler} processed={processed} />
          <dl class="orders" data-chart="choices">
            {(
              [
                [s.greedy, 0],
                [s.sampled, drawn],
              ] as const
            ).map(([who, place]) => (
              <div key={who}>
                <dt>{who}</dt>
                <dd data-id={row.ids[place]}>
                  <TokenText text={tokenText(row.ids[place] ?? 0)} />{" "}
                  <button type="button" class="quiet" onClick={() => take(row.ids[place] ?? 0)}>
                    {s.take}
                  </button>
                </dd>
              </div>
            ))}
          </dl>
          <FindToken row={row} processed={processed} texts={texts} onTake={take} />
        </div>
        <div class="play ranks">
          <QuickControls sampler={sampler} />
          <div class="ranked-head">
            <Choice
              name="scale"
              label={s.scale}
              value={scale}
              options={optionsOf(s, "linear", "log")}
              onChoose={setScale}
            />
          </div>
          <Ranked row={row} processed={processed} ranks={ranks} scale={scale} tokenText={tokenText} onTake={take} />
        </div>
        <div class="play rest">
          <p class="note">{fill(s.covered, { n: ranks.length, mass: `${fixed(100 * Math.min(1, mass), 2)}%` })}</p>
          <p class="note" data-chart="entropy">
            {fill(s.entropy, { raw: fixed(row.entropy, 4), processed: fixed(processed.entropy, 4) })}
          </p>
          <div class="controls buttons">
            <button
              type="button"
              data-do="more"
              disabled={top >= Math.min(500, size)}
              onClick={() => setTop(Math.min(500, top * 2))}
            >
              {s.more}
            </button>
          </div>
          <Stages row={row} processed={processed} tokenText={tokenText} />
          <RankCurve row={row} processed={processed} tokenText={tokenText} />
          <Draws row={row} processed={processed} seed={seed} position={position} tokenText={tokenText} />
          <CopySampler chain={chain} where={model.given} prompt={reading.text} />
        </div>
      </div>
      <Paths
        model={model.name}
        prompt={context.prompt}
        output={context.output}
        options={sampler.library}
        tokenText={tokenText}
        onTake={(ids) => take(...ids)}
      />
      {current ? (
        <ExportPanel
          name="next"
          title={s.title}
          document={() => nextDocument(shown)}
          tables={() => nextTables(shown, tokenText, s)}
          charts='[data-chart="ranked"], .curve svg'
          live={() => nextLive(shown, tokenText, strings)}
          besideLive=".curve svg"
          about={{ models: [model.name], prompt: promptText(shown), settings: samplerText(shown) }}
          lines={(where) => nextLines(shown, where(model.name), exports.retokenizeNote)}
        />
      ) : null}
    </>
  );
}
