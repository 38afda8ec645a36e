//! The waterfall of a request's durations, drawn as bars.

use gw_telemetry::request_log::{Timing, TimingStage};

use super::format;

/// Width of the drawing, in its units.
const WIDTH: f64 = 1000.0;
/// Least width of a visible bar.
const LEAST: f64 = 3.0;

/// The bar of one stage.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Bar {
    pub(crate) name: &'static str,
    pub(crate) duration: String,
    pub(crate) x: String,
    pub(crate) width: String,
    /// CSS class of the colour.
    pub(crate) colour: &'static str,
}

pub(crate) fn bars(timing: &Timing) -> Vec<Bar> {
    let total = timing.total.max(1) as f64;
    let bar = |TimingStage {
                   name,
                   start_us,
                   length_us,
               }| {
        let width = (length_us as f64 / total * WIDTH).clamp(LEAST, WIDTH);
        let x = (start_us as f64 / total * WIDTH).min(WIDTH - width);
        Bar {
            name,
            duration: format::micros(length_us),
            x: format!("{x:.1}"),
            width: format!("{width:.1}"),
            colour: match name {
                "authenticate" => "authenticate",
                "owner and tunnel" => "wait",
                "tunnel" => "tunnel",
                "agent" => "agent",
                "backend first byte" => "backend",
                _ => "response",
            },
        }
    };
    timing.waterfall().into_iter().map(bar).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_are_consecutive_and_stay_within_the_drawing() {
        let timing = Timing {
            authenticate: 100,
            wait: Some(1),
            agent: Some(50),
            backend_first_byte: Some(549),
            response_head: Some(900),
            total: 1000,
        };
        let spans = |timing: &Timing| {
            bars(timing)
                .into_iter()
                .map(|bar| (bar.colour, bar.x, bar.width))
                .collect::<Vec<_>>()
        };
        let expected = [
            ("authenticate", "0.0", "100.0"),
            ("wait", "100.0", "3.0"),
            ("tunnel", "101.0", "200.0"),
            ("agent", "301.0", "50.0"),
            ("backend", "351.0", "549.0"),
            ("response", "900.0", "100.0"),
        ];
        assert_eq!(
            spans(&timing),
            expected.map(|(colour, x, width)| (colour, x.to_owned(), width.to_owned()))
        );
        // Clocks of gateway and agent that differ.
        for (_, x, width) in spans(&Timing {
            agent: Some(5000),
            total: 0,
            ..timing
        }) {
            let x: f64 = x.parse().unwrap();
            let width: f64 = width.parse().unwrap();
            assert!(
                x >= 0.0 && width >= LEAST && x + width <= WIDTH,
                "{x} {width}"
            );
        }
    }
}
