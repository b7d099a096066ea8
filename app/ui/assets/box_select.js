// Draws a box over a picture with the pointer, and tells the console its edges in the picture's own units.
// data.width, data.rows: what the picture spans; rows are centred on whole numbers. data.part: the edges
// [x0, x1, y0, y1] of the part that is shown elsewhere.

const LEAST = 4; // pixels: less is a click

export default function ({ parentElement, data, setTriggerValue }) {
  const pad = parentElement.querySelector(".or-pad");
  const drawn = pad.querySelector(".or-drawn");
  const x = (share) => share * data.width;
  const y = (share) => share * data.rows - 0.5;
  let from = null;

  place(pad.querySelector(".or-part"), data.part.map((edge, i) => (i < 2 ? edge / data.width : (edge + 0.5) / data.rows)));
  drawn.hidden = true;

  pad.onpointerdown = (event) => {
    if (event.button !== 0) return;
    pad.setPointerCapture(event.pointerId);
    from = [event.clientX, event.clientY];
  };
  pad.onpointermove = (event) => {
    if (from === null) return;
    drawn.hidden = false;
    place(drawn, shares(event));
  };
  pad.onpointerup = (event) => {
    if (from === null) return;
    const [x0, x1, y0, y1] = shares(event);
    const wide = Math.abs(event.clientX - from[0]) >= LEAST;
    from = null;
    if (wide) setTriggerValue("box", [x(x0), x(x1), y(y0), y(y1)]);
    else drawn.hidden = true;
  };
  // The browser scrolls instead, or the window has lost the pointer.
  pad.onpointercancel = () => {
    from = null;
    drawn.hidden = true;
  };
  pad.dataset.ready = "";

  function shares(event) {
    const frame = pad.getBoundingClientRect();
    const within = (value, size) => Math.min(1, Math.max(0, value / size));
    const across = [from[0], event.clientX].map((at) => within(at - frame.left, frame.width));
    const down = [from[1], event.clientY].map((at) => within(at - frame.top, frame.height));
    return [...across.sort((a, b) => a - b), ...down.sort((a, b) => a - b)];
  }

  function place(element, [x0, x1, y0, y1]) {
    Object.assign(element.style, {
      left: `${100 * x0}%`, width: `${100 * (x1 - x0)}%`, top: `${100 * y0}%`, height: `${100 * (y1 - y0)}%`,
    });
  }
}
