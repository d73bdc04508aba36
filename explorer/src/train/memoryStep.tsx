// The memory of the loss of a training step: all logits, or tile by tile.

import type { JSX } from "preact";
import { fill, useStrings } from "../i18n/strings";
import { Bars } from "../ui/bars";
import { Choice, optionsOf } from "../ui/controls";
import { fixed, grouped } from "../ui/format";
import { Code, Prose, Python } from "../ui/prose";
import { change, number, oneOf, useParam } from "../url";
import { Chart } from "./chart";
import {
  BUDGETS,
  DEFAULT_BUDGET,
  PRESETS,
  memory,
  pythonOf,
  showBytes,
  stepOf,
  total,
  type Dtype,
  type Sizes,
  type Tensor,
  type Written,
} from "./lossMemory";
import { MIB } from "./tilePlan";
import { Size } from "./sizeField";
import { FactRow, Heads } from "../ui/factsTable";

export const LIMITS = { v: [64, 1_048_576], d: [16, 16_384], n: [16, 1_048_576] } as const;
const CURVE = Array.from({ length: 15 }, (_, k) => 2 ** (4 + k));

export function useSizes() {
  const [vocab, setVocab] = useParam("v", number(49_152, ...LIMITS.v));
  const [width, setWidth] = useParam("d", number(576, ...LIMITS.d));
  const [tokens, setTokens] = useParam("n", number(8192, ...LIMITS.n));
  const [dtype, setDtype] = useParam("dtype", oneOf<Dtype>("float32", ["float32", "bfloat16"]));
  const [written, setWritten] = useParam("loss", oneOf<Written>("plain", ["plain", "upcast"]));
  const [budget, setBudget] = useParam("max", oneOf(String(DEFAULT_BUDGET), BUDGETS.map(String)));
  const sizes: Sizes = {
    vocab: Math.floor(vocab),
    width: Math.floor(width),
    tokens: Math.floor(tokens),
    dtype,
    written,
    maxBytes: Number(budget) * MIB,
  };
  return { sizes, setVocab, setWidth, setTokens, setDtype, setWritten, budget, setBudget };
}

export function Cost({ given }: { given: ReturnType<typeof useSizes> }): JSX.Element {
  const { train, common } = useStrings();
  const { cost: s } = train;
  const { sizes, budget } = given;
  const found = memory(sizes);
  const [dense, streamed] = [total(found.dense), total(found.streamed)];
  const { plan } = found;
  const chunks = Math.ceil(sizes.tokens / plan.chunkRows);
  const times = dense >= streamed ? dense / streamed : streamed / dense;
  const python = pythonOf(sizes);
  return (
    <section class="step" aria-labelledby="cost-title">
      <div class="text-column">
        <h2 id="cost-title">{s.title}</h2>
        <Prose text={s.text} />
        <Prose text={s.streams} />
        <p class="try">
          <strong>{common.try}</strong> {s.try}
        </p>
      </div>
      <div class="play">
        <div class="controls">
          <div class="presets" role="group" aria-label={s.presets}>
            {PRESETS.map(({ name, vocab, width }) => (
              <button
                key={name}
                type="button"
                aria-pressed={vocab === sizes.vocab && width === sizes.width}
                onClick={() => change({ v: String(vocab), d: String(width) })}
              >
                {name}
              </button>
            ))}
          </div>
          {(
            [
              ["v", s.vocab, sizes.vocab, given.setVocab],
              ["d", s.width, sizes.width, given.setWidth],
              ["n", s.tokens, sizes.tokens, given.setTokens],
            ] as const
          ).map(([name, label, value, set]) => (
            <Size key={name} name={name} label={label} value={value} range={LIMITS[name]} onSet={set} />
          ))}
        </div>
        <div class="controls pair">
          <Choice
            name="dtype"
            label={s.dtype}
            value={sizes.dtype}
            options={
              [
                ["float32", "float32"],
                ["bfloat16", "bfloat16"],
              ] as const
            }
            onChoose={given.setDtype}
          />
          <Choice
            name="max"
            label={s.bound}
            value={budget}
            options={BUDGETS.map((mib) => [String(mib), `${mib} MiB`] as const)}
            onChoose={given.setBudget}
          />
          <Choice
            name="loss"
            label={s.written}
            value={sizes.written}
            options={optionsOf(s, "plain", "upcast")}
            onChoose={given.setWritten}
          />
        </div>
        <p class="headline" data-chart="headline" aria-live="polite">
          {fill(dense >= streamed ? s.less : s.more, {
            dense: showBytes(dense),
            streamed: showBytes(streamed),
            times: times >= 9.95 ? grouped(Math.round(times)) : fixed(times, 1),
          })}
        </p>
        <Bars
          name="memory"
          caption={s.beyond}
          heads={["", s.size]}
          domain={[0, Math.max(dense, streamed)]}
          rows={[
            { head: s.dense, cells: [showBytes(dense)], value: dense, tone: "down" },
            { head: s.streamed, cells: [showBytes(streamed)], value: streamed },
          ]}
        />
        <table class="facts tensors" data-chart="tensors">
          <caption>{s.tensors}</caption>
          <Heads of={[s.tensor, s.shape, s.dtype, s.size]} />
          {(
            [
              [s.dense, found.dense],
              [s.streamed, found.streamed],
            ] as const
          ).map(([way, tensors]) => (
            <tbody key={way}>
              <tr>
                <th scope="rowgroup" colSpan={4} class="way">
                  {way}
                </th>
              </tr>
              {tensors.map((tensor) => (
                <TensorRow key={tensor.name} tensor={tensor} />
              ))}
            </tbody>
          ))}
        </table>
        <p class="note">
          {fill(plan.retained ? s.retained : s.one, {
            chunks: grouped(chunks),
            rows: grouped(plan.chunkRows),
            tiles: grouped(Math.ceil(sizes.vocab / plan.tileTokens)),
            tile: grouped(plan.tileTokens),
          })}
        </p>
        <p class="note">{fill(s.same, { size: showBytes(found.results) })}</p>
        <Growth sizes={sizes} />
      </div>
      <Python code={python.code} values={python.values} />
      <Code title={s.step} code={stepOf(sizes)} />
    </section>
  );
}

function TensorRow({ tensor }: { tensor: Tensor }): JSX.Element {
  const { train } = useStrings();
  return (
    <FactRow
      data-tensor={tensor.name}
      data-bytes={tensor.bytes}
      head={train.cost.names[tensor.name]}
      cells={[tensor.shape || "—", tensor.dtype, showBytes(tensor.bytes)]}
    />
  );
}

/** Memory by number of tokens, on log scales. */
function Growth({ sizes }: { sizes: Sizes }): JSX.Element {
  const { train } = useStrings();
  const { cost: s } = train;
  const at = (tokens: number): readonly [number, number] => {
    const found = memory({ ...sizes, tokens });
    return [total(found.dense), total(found.streamed)];
  };
  const rows = CURVE.map((tokens) => [tokens, ...at(tokens)] as const);
  const all = rows.flatMap(([, dense, streamed]) => [dense, streamed]);
  const [low, high] = [Math.min(...all), Math.max(...all)];
  const powers = Array.from({ length: 51 }, (_, k) => 2 ** k);
  return (
    <Chart
      name="growth"
      caption={s.growth}
      summary={fill(s.summary, {
        n: grouped(sizes.tokens),
        dense: showBytes(at(sizes.tokens)[0]),
        streamed: showBytes(at(sizes.tokens)[1]),
      })}
      x={{
        label: s.tokens,
        domain: [CURVE[0] ?? 16, CURVE.at(-1) ?? 1],
        log: true,
        ticks: CURVE.filter((_, k) => k % 2 === 0),
        show: (n) => (n < 1024 ? String(n) : `${n / 1024}k`),
      }}
      y={{
        label: s.size,
        domain: [low / 2, high * 2],
        log: true,
        ticks: powers.filter((_, k) => k % 4 === 0),
        show: showBytes,
      }}
      series={[
        { label: s.dense, look: "dashed", points: rows.map(([n, dense]) => [n, dense]) },
        { label: s.streamed, look: "plain", points: rows.map(([n, , streamed]) => [n, streamed]) },
      ]}
      guide={Math.min(sizes.tokens, CURVE.at(-1) ?? 1)}
      height={240}
    >
      <table class="facts">
        <Heads of={[s.tokens, s.dense, s.streamed]} />
        <tbody>
          {rows.map(([n, dense, streamed]) => (
            <FactRow key={n} head={grouped(n)} cells={[showBytes(dense), showBytes(streamed)]} />
          ))}
        </tbody>
      </table>
    </Chart>
  );
}
