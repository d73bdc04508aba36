// The settings of one side's sampler, as the address has them.

import { number, oneOf, useParam, type Set } from "../url";
import { AT_FIRST, ORDERS, type Options, type Order, type SideName } from "./sides";

export interface SamplerState {
  readonly options: Options;
  set<K extends keyof Options>(name: K): Set<Options[K]>;
}

export function useSampler(side: SideName): SamplerState {
  const first = AT_FIRST[side];
  const [temperature, setTemperature] = useParam(`t${side}`, number(first.temperature, 0.05, 3));
  const [topK, setTopK] = useParam(`k${side}`, number(first.topK, 0, 200));
  const [topP, setTopP] = useParam(`p${side}`, number(first.topP, 0, 1));
  const [minP, setMinP] = useParam(`m${side}`, number(first.minP, 0, 1));
  const [order, setOrder] = useParam(`o${side}`, oneOf<Order>(first.order, ORDERS));
  const setters = { temperature: setTemperature, topK: setTopK, topP: setTopP, minP: setMinP, order: setOrder };
  return {
    options: { temperature, topK: Math.floor(topK), topP, minP, order },
    set: (name) => setters[name] as never,
  };
}
