// The page of the next word: a text, the model's ranked words, and a sampler that acts at once.

import type { JSX } from "preact";
import { useContext, useMemo } from "preact/hooks";
import { fill, useStrings } from "../i18n";
import { Models } from "../models";
import { gumbels } from "../math/philox";
import { Choice, Slider, WholeNumber } from "../ui/controls";
import { Exports } from "../ui/export";
import { fixed, whole } from "../ui/format";
import { number, oneOf, text, useParam, wholes } from "../url";
import { Find } from "./find";
import { RankCurve } from "./curve";
import { nextDocument, nextLines, nextTables, type Shown } from "./export";
import { Ranked } from "./ranked";
import type { Order, Settings } from "./row";
import { Stages } from "./stages";
import { TokenText } from "./tokens";
import { useNext } from "./useNext";

export function NextPage(): JSX.Element {
  const { next: s, exports } = useStrings();
  const models = useContext(Models);
  const known = models.map(({ name }) => name);
  const [name, setName] = useParam("model", oneOf(known[0] ?? "", known));
  const [prompt, setPrompt] = useParam("prompt", text("Once upon a time"));
  const [more, setMore] = useParam("more", wholes);
  const [temperature, setTemperature] = useParam("t", number(1, 0.05, 3));
  const [topK, setTopK] = useParam("k", number(0, 0, 200));
  const [topP, setTopP] = useParam("p", number(1, 0, 1));
  const [minP, setMinP] = useParam("m", number(0, 0, 1));
  const [order, setOrder] = useParam("order", oneOf<Order>("hf", ["hf", "llama.cpp"]));
  const [seed, setSeed] = useParam("seed", number(0, 0, Number.MAX_SAFE_INTEGER));
  const [top, setTop] = useParam("top", number(15, 1, 500));
  const { reading, texts, waiting, failed } = useNext(name, prompt, more);
  const model = models.find((one) => one.name === name);

  const settings: Settings = { temperature, topK: Math.floor(topK), topP, minP, order };
  const processed = useMemo(
    () => reading?.row.process(settings),
    [reading, temperature, topK, topP, minP, order],
  );
  const position = reading?.prompt.length ?? 0;
  const size = reading?.row.ids.length ?? 0;
  const noise = useMemo(() => gumbels(Math.floor(seed), position, size), [seed, position, size]);
  const say = (id: number): string => texts?.[id] ?? String(id);
  const take = (id: number): void => setMore([...more, id]);
  const drawn = useMemo(() => processed?.draw(noise) ?? 0, [processed, noise]);
  const shown: Shown | undefined = reading &&
    processed &&
    model && { model, text: prompt, taken: more.length, prompt: reading.prompt, row: reading.row, processed, settings, seed: Math.floor(seed), top, drawn };

  return (
    <div class="next">
      <header class="intro">
        <h1>{s.title}</h1>
        <p class="note">{fill(s.lead, { model: name, n: whole(model?.vocab_size ?? 0) })}</p>
      </header>
      {models.length > 1 ? (
        <Choice name="model" label={s.model} value={name} options={known.map((one) => [one, one] as const)} onChoose={setName} />
      ) : null}
      <form
        class="prompt"
        onSubmit={(event) => {
          event.preventDefault();
          setMore([]);
          setPrompt(String(new FormData(event.currentTarget).get("prompt")));
        }}
      >
        <label for="prompt">{s.prompt}</label>
        <textarea id="prompt" name="prompt" rows={2} key={prompt}>
          {prompt}
        </textarea>
        <button type="submit">{s.read}</button>
      </form>
      <p class={failed ? "note alarm" : "note"} role="status" aria-busy={waiting}>
        {failed ? fill(s.failed, { message: failed }) : waiting ? s.waiting : ""}
      </p>
      {reading && processed ? (
        <>
          <section aria-label={s.tokens}>
            <p class="note">{s.tokens}</p>
            <p class="pieces" data-chart="pieces">
              {reading.prompt.map((token, at) => (
                <span key={at} class="piece" title={fill(s.position, { n: at + 1 }) + `, ${s.id} ${token.id}`}>
                  <TokenText text={token.text} />
                </span>
              ))}
              <span class="blank">___</span>
            </p>
            <button type="button" class="quiet" data-do="undo" disabled={!more.length} onClick={() => setMore(more.slice(0, -1))}>
              {s.undo}
            </button>
          </section>
          <div class="step">
            <div class="words controls">
              <Slider name="t" label={s.temperature} value={temperature} low={0.05} high={3} step={0.05} shown={fixed(temperature)} onMove={(x) => setTemperature(x, true)} />
              <Slider name="k" label={s.top_k} value={topK} low={0} high={200} step={1} shown={topK ? String(topK) : s.all} onMove={(x) => setTopK(x, true)} />
              <Slider name="p" label={s.top_p} value={topP} low={0} high={1} step={0.01} shown={fixed(topP)} onMove={(x) => setTopP(x, true)} />
              <Slider name="m" label={s.min_p} value={minP} low={0} high={1} step={0.01} shown={fixed(minP)} onMove={(x) => setMinP(x, true)} />
              <Choice name="order" label={s.order} value={order} options={[["hf", s.hf], ["llama.cpp", s.llama]] as const} onChoose={setOrder} />
              <WholeNumber name="seed" label={s.seed} value={seed} low={0} high={Number.MAX_SAFE_INTEGER} onSet={(x) => setSeed(x, true)} />
              <Stages row={reading.row} processed={processed} />
              <dl class="orders" data-chart="says">
                {([[s.greedy, 0], [s.sampled, drawn]] as const).map(([who, place]) => (
                  <div key={who}>
                    <dt>{who}</dt>
                    <dd data-id={reading.row.ids[place]}>
                      <TokenText text={say(reading.row.ids[place] ?? 0)} />{" "}
                      <button type="button" class="quiet" onClick={() => take(reading.row.ids[place] ?? 0)}>
                        {s.take}
                      </button>
                    </dd>
                  </div>
                ))}
              </dl>
              <Find row={reading.row} processed={processed} texts={texts ?? []} onTake={take} />
            </div>
            <div class="play">
              <Ranked row={reading.row} processed={processed} top={top} say={say} onTake={take} />
              <p class="note">
                {fill(s.covered, {
                  n: Math.min(top, reading.row.ids.length),
                  mass: `${fixed(100 * (reading.row.mass[Math.min(top, reading.row.ids.length)] ?? NaN), 2)} %`,
                })}
              </p>
              <p class="note" data-chart="entropy">
                {fill(s.entropy, { raw: fixed(reading.row.entropy, 4), processed: fixed(processed.entropy, 4) })}
              </p>
              <RankCurve row={reading.row} />
              <div class="controls buttons">
                <button type="button" data-do="more" disabled={top >= Math.min(500, reading.row.ids.length)} onClick={() => setTop(Math.min(500, top * 2))}>
                  {s.more}
                </button>
              </div>
            </div>
          </div>
          {shown ? (
            <Exports
              name="next"
              title={s.title}
              document={() => nextDocument(shown)}
              tables={() => nextTables(shown, say, s)}
              charts='[data-chart="ranked"], .curve svg'
              lines={(where) => nextLines(shown, where(name), exports.anew)}
            />
          ) : null}
        </>
      ) : null}
    </div>
  );
}
