// The page of the next word: a text, the model's ranked words, and a sampler that acts at once.

import type { JSX } from "preact";
import { useContext, useMemo } from "preact/hooks";
import type { Model } from "../ask";
import { Language, fill, useStrings } from "../i18n";
import { Models } from "../models";
import { gumbels } from "../math/philox";
import { Choice } from "../ui/controls";
import { Exports } from "../ui/export";
import { fixed, whole } from "../ui/format";
import { Status } from "../ui/status";
import { useTexts } from "../asked";
import { useKept } from "../text/useKept";
import { change, integer, oneOf, text, useParam } from "../url";
import { goTo, parse, path, show, type Branches } from "./branches";
import { Find } from "./find";
import { RankCurve } from "./curve";
import { nextDocument, nextLines, nextTables, type Shown } from "./export";
import { Noise } from "./noise";
import { Paths } from "./paths";
import { Ranked, shownPlaces } from "./ranked";
import { SamplerControls } from "./sampler";
import { Stages } from "./stages";
import { TokenText } from "./tokens";
import { useNext, type Reading } from "./useNext";
import { useSampler, type SamplerState } from "./useSampler";
import { Written } from "./written";

const AS_IT_IS = text("");

export function NextPage(): JSX.Element {
  const { next: s, text: { lost } } = useStrings();
  const lang = useContext(Language);
  const models = useContext(Models);
  const known = models.map(({ name }) => name);
  const [name] = useParam("model", oneOf(known[0] ?? "", known));
  const model = models.find((one) => one.name === name);
  const example = model?.speaks.includes(lang) ? s.example : s.example_en;
  const { text: prompt, key, to } = useKept("prompt", example);
  const [more] = useParam("more", AS_IT_IS);
  const [others] = useParam("branches", AS_IT_IS);
  const branches = parse(more, others || null);
  const sampler = useSampler();
  const asked = useNext(name, prompt, path(branches));
  // The words on the page are those of the model that gave the row, until the next row is there.
  const reading = asked.found;
  const read = models.find((one) => one.name === reading?.model);
  const texts = useTexts(reading?.model);
  const go = (where: Branches): void => change({ ...to(prompt ?? ""), ...show(where), paths: null });
  const anew = (what: Record<string, string | null>): void => change({ more: null, branches: null, paths: null, ...what });

  return (
    <div class="next">
      <header class="intro">
        <h1>{s.title}</h1>
        <p class="note">{fill(s.lead, { model: name, n: whole(model?.vocab_size ?? 0) })}</p>
      </header>
      {models.length > 1 ? (
        <Choice name="model" label={s.model} value={name} options={known.map((one) => [one, one] as const)} onChoose={(one) => anew({ model: one === known[0] ? null : one })} />
      ) : null}
      <form
        class="prompt"
        onSubmit={(event) => {
          event.preventDefault();
          const given = String(new FormData(event.currentTarget).get("prompt"));
          if (asked.failed && given === prompt) asked.again();
          else anew(to(given));
        }}
      >
        <label for="prompt">{s.prompt}</label>
        <textarea id="prompt" name="prompt" rows={2} key={key}>
          {prompt}
        </textarea>
        <button type="submit">{s.read}</button>
      </form>
      {prompt === undefined ? <p class="note alarm" role="alert">{lost}</p> : null}
      <Status asked={asked} waiting={s.waiting} />
      {texts.failed ? <Status asked={texts} waiting="" /> : null}
      {reading && read ? (
        <div class={asked.current ? "" : "stale"}>
          <Behind model={read} reading={reading} current={asked.current} texts={(texts.current && texts.found) || []} branches={branches} sampler={sampler} onChange={go} />
        </div>
      ) : null}
    </div>
  );
}

interface BehindProps {
  readonly model: Model;
  readonly reading: Reading;
  /** Whether it is that of the text and the words now in the address. */
  readonly current: boolean;
  readonly texts: readonly string[];
  readonly branches: Branches;
  readonly sampler: SamplerState;
  onChange(to: Branches): void;
}

/** What stands behind a text that was read. */
function Behind({ model, reading, current, texts, branches, sampler, onChange }: BehindProps): JSX.Element {
  const { next: s, exports } = useStrings();
  const [top, setTop] = useParam("top", integer(15, 1, 500));
  const { row, said } = reading;
  const { settings, seed } = sampler;
  const processed = useMemo(() => row.process(settings, said), [reading, JSON.stringify(settings)]);
  const position = reading.prompt.length;
  const size = row.ids.length;
  const noise = useMemo(() => new Noise(gumbels(seed, position, size)), [seed, position, size]);
  const drawn = useMemo(() => processed.draw(noise), [processed, noise]);
  const places = useMemo(() => shownPlaces(row, processed, top), [row, processed, top]);
  const mass = places.reduce((sum, place) => sum + row.p(place), 0);
  const say = (id: number): string => texts[id] ?? String(id);
  const shown: Shown = { model, text: reading.text, said, prompt: reading.prompt, row, processed, settings, seed, top, drawn };
  const take = (...ids: number[]): void => onChange(goTo(branches, [...said.output, ...ids]));

  return (
    <>
      <Written reading={reading} branches={branches} sampled={row.ids[drawn] ?? 0} say={say} onChange={onChange} />
      <div class="step">
        <div class="words controls">
          <SamplerControls sampler={sampler} />
          <dl class="orders" data-chart="says">
            {([[s.greedy, 0], [s.sampled, drawn]] as const).map(([who, place]) => (
              <div key={who}>
                <dt>{who}</dt>
                <dd data-id={row.ids[place]}>
                  <TokenText text={say(row.ids[place] ?? 0)} />{" "}
                  <button type="button" class="quiet" onClick={() => take(row.ids[place] ?? 0)}>
                    {s.take}
                  </button>
                </dd>
              </div>
            ))}
          </dl>
          <Find row={row} processed={processed} texts={texts} onTake={take} />
        </div>
        <div class="play">
          <Ranked row={row} processed={processed} places={places} say={say} onTake={take} />
          <p class="note">{fill(s.covered, { n: places.length, mass: `${fixed(100 * Math.min(1, mass), 2)}%` })}</p>
          <p class="note" data-chart="entropy">
            {fill(s.entropy, { raw: fixed(row.entropy, 4), processed: fixed(processed.entropy, 4) })}
          </p>
          <div class="controls buttons">
            <button type="button" data-do="more" disabled={top >= Math.min(500, size)} onClick={() => setTop(Math.min(500, top * 2))}>
              {s.more}
            </button>
          </div>
          <Stages row={row} processed={processed} say={say} />
          <RankCurve row={row} />
        </div>
      </div>
      <Paths model={model.name} prompt={said.prompt} output={said.output} options={sampler.options} say={say} onTake={(ids) => take(...ids)} />
      {current ? (
        <Exports
          name="next"
          title={s.title}
          document={() => nextDocument(shown)}
          tables={() => nextTables(shown, say, s)}
          charts='[data-chart="ranked"], .curve svg'
          lines={(where) => nextLines(shown, where(model.name), exports.anew)}
        />
      ) : null}
    </>
  );
}
