//! Counters that threads share, declared once with the metrics that they are.

use std::fmt::Debug;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Value of a counter, or a flag.
pub(crate) trait Counted: Copy {
    type Cell: Debug + Default;

    fn load(cell: &Self::Cell) -> Self;

    /// Value of the metric.
    fn metric(self) -> u64;
}

impl Counted for u64 {
    type Cell = AtomicU64;

    fn load(cell: &AtomicU64) -> Self {
        cell.load(Ordering::Relaxed)
    }

    fn metric(self) -> u64 {
        self
    }
}

impl Counted for bool {
    type Cell = AtomicBool;

    fn load(cell: &AtomicBool) -> Self {
        cell.load(Ordering::Relaxed)
    }

    fn metric(self) -> u64 {
        u64::from(self)
    }
}

/// Declares counters, a copy of their values for readers, and their metrics. Fields after `beside`
/// are not counted: those of the copy are set by its owner.
macro_rules! shared_counters {
    (
        $(#[$attribute:meta])*
        $values:ident of $counters:ident {
            $($name:ident: $type:ty = $kind:ident $metric:literal, $help:literal;)*
        }
        $values_beside:ident beside { $($(#[$of_field:meta])* $field:ident: $field_type:ty;)* }
        $counters_beside:ident beside { $($(#[$of_own:meta])* $own:ident: $own_type:ty;)* }
    ) => {
        $(#[$attribute])*
        #[derive(Debug, Clone, Copy, Default, PartialEq)]
        pub struct $values {
            $(#[doc = $help] pub $name: $type,)*
            $($(#[$of_field])* pub $field: $field_type,)*
        }

        #[derive(Debug, Default)]
        pub(crate) struct $counters {
            $(pub(crate) $name: <$type as $crate::shared_counters::Counted>::Cell,)*
            $($(#[$of_own])* $own: $own_type,)*
        }

        impl $counters {
            /// Values of the counters.
            fn counted(&self) -> $values {
                $values {
                    $($name: <$type as $crate::shared_counters::Counted>::load(&self.$name),)*
                    $($field: Default::default(),)*
                }
            }
        }

        impl $values {
            fn write_counted(&self, out: &mut Exposition) {
                $(
                    let value = $crate::shared_counters::Counted::metric(self.$name);
                    out.single($metric, Kind::$kind, $help, value);
                )*
            }
        }
    };
}

pub(crate) use shared_counters;
