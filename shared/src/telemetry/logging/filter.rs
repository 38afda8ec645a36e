//! Filter of log lines, as in the variable `GW_LOG`: `info,rustls=error`.

use tracing_subscriber::filter::{LevelFilter, Targets};

/// Parses directives that commas separate: a level, `target=level`, or a target, of which
/// everything is logged.
///
/// A target is the beginning of a module's path. The longest one that matches an event decides.
/// Without a directive, only errors are logged.
///
/// `Targets` parses this syntax itself, but takes an empty directive for `error`, and does not name
/// an invalid one.
pub(super) fn filter(text: &str) -> Result<Targets, String> {
    let directives = text.split(',').map(str::trim);
    let mut directives = directives
        .filter(|directive| !directive.is_empty())
        .peekable();
    if directives.peek().is_none() {
        return Ok(Targets::new().with_default(LevelFilter::ERROR));
    }
    directives.try_fold(Targets::new(), |filter, directive| {
        if let Ok(level) = directive.parse::<LevelFilter>() {
            return Ok(filter.with_default(level));
        }
        let (target, level) = directive.split_once('=').unwrap_or((directive, ""));
        // Other filters of this syntax have spans, fields and regular expressions.
        let is_plain = |c: char| c.is_alphanumeric() || "_:-.".contains(c);
        if target.is_empty() || !target.chars().all(is_plain) {
            return Err(format!(
                "{directive:?} is neither a level nor a target nor `target=level`"
            ));
        }
        let level = match level {
            "" => LevelFilter::TRACE,
            level => level.parse().map_err(|_| {
                format!("{level:?} is not one of off, error, warn, info, debug and trace")
            })?,
        };
        Ok(filter.with_target(target, level))
    })
}

#[cfg(test)]
mod tests {
    use tracing::Level;

    use super::*;

    #[test]
    fn the_longest_target_decides() {
        let filter = filter("info, gw_gateway::tunnel=DEBUG,rustls=off,h2,hyper=,").unwrap();
        for (target, level, is_logged) in [
            ("gw_gateway", Level::INFO, true),
            ("gw_gateway", Level::DEBUG, false),
            ("gw_gateway::tunnel::session", Level::DEBUG, true),
            ("gw_gateway::tunnel::session", Level::TRACE, false),
            ("rustls::conn", Level::ERROR, false),
            ("h2::proto", Level::TRACE, true),
            ("hyper", Level::TRACE, true),
        ] {
            let found = filter.would_enable(target, &level);
            assert_eq!(found, is_logged, "{target} {level}");
        }
    }

    #[test]
    fn targets_alone_log_nothing_else() {
        let filter = filter("gw_agent=4").unwrap();
        assert!(filter.would_enable("gw_agent", &Level::DEBUG));
        assert!(!filter.would_enable("h2", &Level::ERROR));
    }

    #[test]
    fn an_empty_filter_logs_errors() {
        for text in ["", " , "] {
            let filter = filter(text).unwrap();
            assert!(filter.would_enable("gw_agent", &Level::ERROR));
            assert!(!filter.would_enable("gw_agent", &Level::WARN));
        }
    }

    #[test]
    fn invalid_directives_are_named() {
        let no_level = "is not one of off, error, warn, info, debug and trace";
        let no_directive = "is neither a level nor a target nor `target=level`";
        for (text, named, reason) in [
            ("info,h2=loud", "loud", no_level),
            (
                "h2[stream{id=1}]=debug",
                "h2[stream{id=1}]=debug",
                no_directive,
            ),
            ("=debug", "=debug", no_directive),
            ("a=b=info", "b=info", no_level),
        ] {
            assert_eq!(filter(text).unwrap_err(), format!("{named:?} {reason}"));
        }
    }
}
