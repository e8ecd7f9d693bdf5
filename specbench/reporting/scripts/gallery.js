// The gallery of images: filter by category, and a viewer in which arrow keys flip between decoders in place.
(() => {
  const viewer = document.getElementById("viewer");
  if (!viewer) return;
  const stage = viewer.querySelector(".stage"), title = viewer.querySelector("h4"), told = viewer.querySelector(".facts");
  let shown = null;

  const visible = (gallery) => [...gallery.querySelectorAll("tbody tr")].filter((row) => !row.hidden);
  const frames = (row) => [...row.querySelectorAll("td")].map((cell) => cell.querySelector(".frame"));
  const name = (frame) => frame.closest("td").dataset.run;

  // The overlay of differences shows the image of the row's first run over each image, subtracted by the browser.
  document.querySelectorAll(".gallery tbody tr").forEach((row) => {
    const [first, ...others] = frames(row);
    const base = first && first.querySelector(".base");
    others.filter((frame) => frame && base).forEach((frame) => {
      const over = base.cloneNode();
      over.className = "over difference";
      over.alt = "difference from " + name(first);
      frame.append(over);
    });
  });

  document.querySelectorAll(".gallery select").forEach((select) =>
    select.addEventListener("change", () =>
      select.closest(".gallery").querySelectorAll("tbody tr").forEach((row) => {
        row.hidden = Boolean(select.value) && row.dataset.category !== select.value;
      })));

  function show(frame) {
    if (!frame) return;
    shown = frame;
    const copy = frame.cloneNode(true);
    copy.removeAttribute("id");
    stage.replaceChildren(...copy.children);
    title.textContent = name(frame);
    viewer.querySelector(".prompt").textContent = frame.closest("tr").dataset.prompt;
    told.textContent = frame.closest("td").querySelector(".facts").textContent;
    viewer.dataset.overlay = overlay(frame.closest(".gallery"));
  }

  const overlay = (gallery) => gallery.querySelector("input[type=radio]:checked").value;

  function flip(across, down) {
    const rows = visible(shown.closest(".gallery")), row = shown.closest("tr"), all = frames(row);
    let line = rows.indexOf(row), place = all.indexOf(shown);
    const height = rows.length, width = all.length;
    for (let tries = 0; tries < width * height; tries++) {
      place = (place + across + width) % width;
      line = (line + down + height) % height;
      const found = frames(rows[line])[place];
      if (found) return show(found);
    }
  }

  function nextOverlay() {
    const radios = [...shown.closest(".gallery").querySelectorAll("input[type=radio]")];
    radios[(radios.findIndex((radio) => radio.checked) + 1) % radios.length].checked = true;
    viewer.dataset.overlay = overlay(shown.closest(".gallery"));
  }

  document.addEventListener("click", (event) => {
    const frame = event.target.closest(".gallery .frame");
    if (frame) {
      show(frame);
      viewer.showModal();
    } else if (event.target === viewer) viewer.close();
  });
  const steps = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
  viewer.addEventListener("keydown", (event) => {
    if (steps[event.key]) flip(...steps[event.key]);
    else if (event.key === "o") nextOverlay();
    else return;
    event.preventDefault();
  });
  viewer.querySelectorAll("[data-step]").forEach((button) =>
    button.addEventListener("click", () => flip(...steps[button.dataset.step])));
  viewer.querySelector("[data-overlay-next]").addEventListener("click", nextOverlay);
  viewer.addEventListener("close", () => shown && shown.focus());
})();
