// Tells the console which part of its time axis a Plotly chart shows once somebody has dragged over it, moved it or
// asked for all of it: [from, to] in the axis's unit, or [] for all. data.chart: the key of the chart.

const SETTLED = 250; // milliseconds without a change: moving sends many
const TWICE = 500; // milliseconds between the clicks of a double click, at most, and pixels
const LEAST = 6;
const NEVER = { at: -Infinity, x: 0, y: 0 };
const pending = new WeakMap();

export default function ({ parentElement, data, setTriggerValue }) {
  // This is run again at each run of the page, one of which may come before what is to be told has been.
  const state = pending.get(parentElement) ?? { timer: 0, pressed: NEVER };
  pending.set(parentElement, state);
  state.send = setTriggerValue;
  const selector = `.st-key-${CSS.escape(data.chart)}`;
  let chart = null;

  const tell = (range) => {
    clearTimeout(state.timer);
    state.timer = setTimeout(() => parentElement.isConnected && state.send("range", range), SETTLED);
  };
  const moved = (change) => {
    if (Object.keys(change).some((name) => name.startsWith("xaxis"))) tell(chart.layout.xaxis.range.map(Number));
  };
  // Neither Plotly's own double click nor the browser's: of two clicks the first may have the chart drawn anew. And not
  // told at once: Streamlit tells the console of the clicks, and what that answers to them would be lost.
  const pressed = ({ button, target, timeStamp, clientX, clientY }) => {
    if (button !== 0 || !target.closest?.(selector) || target.closest(".modebar")) return;
    const { at, x, y } = state.pressed;
    const twice = timeStamp - at < TWICE && Math.hypot(clientX - x, clientY - y) < LEAST;
    state.pressed = twice ? NEVER : { at: timeStamp, x: clientX, y: clientY };
    if (twice) tell([]);
  };
  // Streamlit draws a chart anew in another element when it has other data.
  const look = () => {
    const found = document.querySelector(`${selector} .js-plotly-plot`);
    if (!found?.on || found === chart) return;
    chart?.removeListener?.("plotly_relayout", moved);
    chart = found;
    chart.on("plotly_relayout", moved);
    chart.dataset.zoom = "told";
  };
  const observer = new MutationObserver(look);
  observer.observe(document.body, { childList: true, subtree: true });
  document.addEventListener("pointerdown", pressed, true);
  look();
  return () => {
    observer.disconnect();
    document.removeEventListener("pointerdown", pressed, true);
    chart?.removeListener?.("plotly_relayout", moved);
  };
}
